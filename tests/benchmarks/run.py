"""Measures spmdzero beside its peers and writes docs/benchmarks.md.

python tests/benchmarks/run.py
"""

import argparse
import time
from pathlib import Path

from harness import machine, sections
from harness.sections import Scale

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"

HOST_TIME = "## Host time"
INTRODUCTION = """# Benchmarks

After reading this page you know how fast a step is beside what you could use instead, what it costs
to start, and how to measure it on your machine.

`make bench` wrote this page; no number on it was typed.
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
"""


def measure(scale: Scale) -> list[str]:
    """The lines of all sections."""
    middle, runs = sections.peers(
        scale.middle, scale.everybody, steps=scale.steps, rounds=scale.rounds
    )
    large, large_runs = sections.peers(scale.large, scale.fewer, steps=scale.large_steps, rounds=1)
    cnn, _ = sections.peers("cnn", scale.fewer, steps=scale.steps, rounds=1)
    return [
        *("## A GPT of 10 M parameters", "", *middle),
        *("## A GPT of 85 M parameters", "", *large),
        *("## A CNN", "", *cnn),
        *("## Over devices", ""),
        "Seconds a step of the GPT of 10 M parameters. The cores stay the same, so more devices",
        "can't be faster: the columns show what splitting costs.",
        *("", *sections.devices(scale, runs)),
        *("## Over sizes", "", "Seconds a step on 2 devices or ranks.", ""),
        *sections.sizes(scale, runs, large_runs),
        *("## Where the time goes", ""),
        "The GPTs of 10 M and 85 M parameters under spmdzero ZeRO-2 on 2 devices, by a trace of",
        "their steps.",
        *("", *sections.time_of_a_step(scale)),
        *host_time(scale),
        *("## How gradients leave the replica region", ""),
        *('`"spmd": {"reduction": ...}` on 2 devices.', "", *sections.reductions(scale)),
        *("## Stage 1 over stage 0, with micro-batches", ""),
        f"{scale.accumulation} micro-batches a step; both engines in one process, step by step.",
        *("", *sections.accumulation(scale)),
        *("## Start-up", ""),
        "Seconds until the GPT of 85 M parameters is on the devices, and the ratio to the quicker",
        "way of moving its parameters by hand. `initialize` also makes AdamW's states.",
        *("", *sections.start_up(scale)),
    ]


def host_time(scale: Scale) -> list[str]:
    """The section that `--host-time` measures alone."""
    return [
        *(
            HOST_TIME,
            "",
            "Processor time of the thread that traces and launches, for one step of the",
        ),
        "GPT of 85 M parameters, 12 layers, under spmdzero ZeRO-2 on 2 devices: with",
        '`"spmd": {"capture": false}`, and without. `python tests/benchmarks/run.py --host-time`',
        "measures this section alone.",
        *("", *sections.host_time(scale)),
    ]


def write_host_time(page: Path, scale: Scale) -> None:
    """Measures host time, and puts it in the place of what the page says of it."""
    before, _, rest = page.read_text().partition(HOST_TIME)
    after = rest.partition("\n## ")[2]
    lines = "\n".join(host_time(scale)).rstrip()
    page.write_text(
        "\n\n".join([before.rstrip(), lines, *(["## " + after] if after else [])]).rstrip() + "\n"
    )


def write(page: Path, scale: Scale) -> None:
    """Measures everything and writes the page."""
    about, start = machine.describe(), time.monotonic()
    body = measure(scale)
    about.append(f"measured in {(time.monotonic() - start) / 60:.0f} minutes")
    lines = [INTRODUCTION, *(f"- {line}" for line in about), "", METHOD, *body]
    page.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--host-time", action="store_true", help="write this section anew only")
    arguments = parser.parse_args()
    (write_host_time if arguments.host_time else write)(arguments.out, Scale())
