"""Measures spmdzero beside its peers and writes docs/benchmarks.md.

python tests/benchmarks/run.py
python tests/benchmarks/run.py --only "Host time" --only "Start-up"
"""

import argparse
import datetime
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import tpu
from harness import machine, own_sections, peer_sections
from harness.peer_sections import Section, peers
from harness.processes import ProcessFailedError
from harness.scale import Scale

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"

METHOD = "How it is measured"
SECTIONS: Mapping[str, Section] = {
    "A GPT of 10 M parameters": peers("middle", "everybody", "steps"),
    "A GPT of 23 M parameters": peers("wide", "fewer", "wide_steps"),
    "A GPT of 85 M parameters": peers("large", "fewer", "large_steps"),
    "ZeRO-3": peer_sections.stage_3,
    "A CNN": peers("cnn", "fewer", "steps", counts=(2, 8)),
    "Over devices": peer_sections.devices,
    "Where the time goes": own_sections.time_of_a_step,
    "Matrix products": own_sections.matrix_products,
    "Host time": peer_sections.host_time,
    "Through a client": own_sections.clients,
    "How gradients leave the replica region": peer_sections.reductions,
    "Small tensors": peer_sections.small_tensors,
    "Stage 1 over stage 0, with micro-batches": own_sections.accumulation,
    "Start-up": own_sections.start_up,
    "Second start": own_sections.second_start,
    "A step on a TPU": tpu.a_step,
}


def write(page: Path, scale: Scale, *, only: Collection[str] = ()) -> None:
    """Measures all sections, or some anew, and writes the page around the words that it has.

    Args:
        page: written; read first, `PAGE` where there is none yet.
        scale: how much is measured.
        only: titles of the sections to measure, none for all.

    Raises:
        SystemExit: the other sections were measured with other versions, or on a machine with
            another number of cores or amount of memory.
    """
    about = "\n".join(f"- {line}" for line in machine.describe())
    head, *parts = (page if page.exists() else PAGE).read_text().split("\n## ")
    if only and about not in head:
        raise SystemExit(f"{page} was measured elsewhere, not with\n{about}\nmeasure all of it")
    introduction = "\n".join(line for line in head.splitlines() if not line.startswith("- "))
    known = {title: body.strip() for title, _, body in (part.partition("\n") for part in parts)}
    for title, section in SECTIONS.items():
        if title in only or not only:
            known[title] = _measured(section, scale)
    told = [f"## {title}\n\n{known[title]}" for title in (METHOD, *SECTIONS) if title in known]
    page.write_text("\n\n".join([introduction.rstrip(), about, *told]) + "\n")


def _measured(section: Section, scale: Scale) -> str:
    load, start = os.getloadavg()[0], time.monotonic()
    lines = []
    try:
        for line in section(scale):
            lines.append(line)
    except ProcessFailedError as error:
        lines.append(f"failed: `{error.headline}`")
    body = "\n".join(lines).strip()
    minutes = (time.monotonic() - start) / 60
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return (
        f"{body}\n\nMeasured on {today} in {minutes:.1f} minutes, on {machine.processor()}, "
        f"load {load:.1f} at the start."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument(
        "--only", action="append", default=[], choices=SECTIONS, help="write this section anew"
    )
    parser.add_argument(
        "--kept", action="store_true", help="for TPUs, nothing is compiled: what is kept is shown"
    )
    arguments = parser.parse_args()
    write(arguments.out, Scale(tpu_compile=not arguments.kept), only=arguments.only)
