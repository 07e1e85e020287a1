"""Measures spmdzero beside its peers and writes docs/benchmarks.md.

python tests/benchmarks/run.py
python tests/benchmarks/run.py --only "Host time" --only "Start-up"
"""

import argparse
import datetime
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from harness import machine, sections
from harness.sections import Scale

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"

INTRODUCTION = """# Benchmarks

After reading this page you know how fast a step is beside what you could use instead, what it costs
to start, and how to measure it on your machine.

`make bench` wrote this page; no number on it was typed. It measures each section apart, and writes
some of them anew with `python tests/benchmarks/run.py --only "Host time"`. Sections that were
measured on different days, or processors, are not to be compared with each other.
"""

METHOD = """## How it is measured

Every peer trains the same model from the same weights on the same batches, in fp32, with AdamW and
clipping at a norm of 1, in processes of its own. The peers take turns. Virtual devices of one
process share the machine's cores, and so do ranks: each rank has cores / ranks threads.

- **s/step**: median over the timed steps of all rounds, from handing over the batch until its loss
  is read on the host. **ratio**: to spmdzero ZeRO-2, in the same table. **rounds**: lowest and
  highest median of a round.
- **host ms**: processor time of the thread that traces and launches; `all` where that thread does
  the arithmetic too.
- **compile s**: what the warm-up steps took beyond as many median steps.
- **init s**: from a model on the CPU until model and states are where they are trained.
- **wire MB**: what one device sends in a step. For XLA the ledger of the compiled program, with a
  ring's (N-1)/N; for gloo the loopback's own counter, divided by the ranks.
- **peak MiB**: highest resident memory, of all ranks together; a page that ranks share counts for
  each of them.

DeepSpeed runs with its torch AdamW, the torch peers with the fused one. FSDP2 keeps parameters
whole between forward and backward, which is its nearest to ZeRO-2; FSDPv2 of torch_xla is ZeRO-3.
There the compiler is free to move activations instead of weights. The large model sees 512 tokens a
step, whose activations are smaller than its weights, and they are what it moves: less than half the
bytes. That grows with the tokens; the wire of the others, gradients and weights, doesn't.

XLA compiles for the CPU without XNNPACK, in every peer: with it, matrix products were wrong on an
AMD EPYC of family 25. A section that was measured with it says so.
"""

SECTIONS: Mapping[str, Callable[[Scale], list[str]]] = {
    "A GPT of 10 M parameters": lambda scale: sections.peers(
        scale.middle, scale.everybody, steps=scale.steps, rounds=scale.rounds
    ),
    "A GPT of 23 M parameters": lambda scale: sections.peers(
        scale.wide, scale.fewer, steps=scale.wide_steps, rounds=scale.rounds
    ),
    "A GPT of 85 M parameters": lambda scale: sections.peers(
        scale.large, scale.fewer, steps=scale.large_steps, rounds=scale.rounds
    ),
    "A CNN": lambda scale: sections.peers(
        "cnn", scale.fewer, steps=scale.steps, rounds=scale.rounds
    ),
    "Over devices": sections.devices,
    "Over sizes": sections.sizes,
    "Where the time goes": sections.time_of_a_step,
    "Matrix products": sections.matrix_products,
    "Host time": sections.host_time,
    "Stacked states": sections.stacked_states,
    "How gradients leave the replica region": sections.reductions,
    "Small tensors": sections.small_tensors,
    "Stage 1 over stage 0, with micro-batches": sections.accumulation,
    "Start-up": sections.start_up,
}


def write(page: Path, scale: Scale, *, only: Collection[str] = ()) -> None:
    """Measures all sections, or some anew, and writes the page.

    Args:
        page: written; with `only` read first.
        scale: how much is measured.
        only: titles of the sections to measure, none for all.

    Raises:
        SystemExit: the other sections were measured with other versions, or on a machine with
            another number of cores or amount of memory.
    """
    about = "\n".join(f"- {line}" for line in machine.describe())
    before = page.read_text() if only else ""
    known = dict(_bodies(before))
    if only and about not in before:
        raise SystemExit(f"{page} was measured elsewhere, not with\n{about}\nmeasure all of it")
    bodies = {
        title: _measured(section, scale) if title in only or not only else known.get(title, "")
        for title, section in SECTIONS.items()
    }
    parts = [f"## {title}\n\n{body}" for title, body in bodies.items() if body]
    page.write_text("\n\n".join([INTRODUCTION.rstrip(), about, METHOD.rstrip(), *parts]) + "\n")


def _measured(section: Callable[[Scale], list[str]], scale: Scale) -> str:
    load, start = os.getloadavg()[0], time.monotonic()
    body = "\n".join(section(scale)).strip()
    minutes = (time.monotonic() - start) / 60
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return (
        f"{body}\n\nMeasured on {today} in {minutes:.1f} minutes, on {machine.processor()}, "
        f"load {load:.1f} at the start."
    )


def _bodies(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        yield title, body.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument(
        "--only", action="append", default=[], choices=SECTIONS, help="write this section anew"
    )
    arguments = parser.parse_args()
    write(arguments.out, Scale(), only=arguments.only)
