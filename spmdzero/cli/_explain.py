"""`spmdzero explain`: tells whether a step fits, its traffic, its faults, and its time."""

import re
from pathlib import Path
from typing import Annotated

import typer

from spmdzero.cli._options import AsJson, Html, Strict
from spmdzero.cli._settings import changes
from spmdzero.errors import SpmdZeroUsageError

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<unit>us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def duration(text: str) -> float:
    """Number of seconds in a text such as ``30ms``, ``0.03s`` or ``250us``.

    Raises:
        SpmdZeroUsageError: the text is malformed, or the duration is zero.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found["number"]):
        raise SpmdZeroUsageError(
            f"{text!r} is no time: write a number above 0 and its unit, such as 30ms, 0.03s or "
            "250us"
        )
    return float(found["number"]) * _SECONDS[found["unit"]]


def explain(
    model: Annotated[str, typer.Argument(help="module:function that returns the model")],
    config: Annotated[Path, typer.Argument(help="a DeepSpeed JSON")],
    batch: Annotated[
        list[str],
        typer.Option(
            "--batch",
            "-b",
            help="a shape, such as x=8x128:int64, once for each input; or module:function. "
            "{devices} in it becomes the number of devices.",
        ),
    ],
    tpu: Annotated[
        list[str] | None,
        typer.Option(help="a topology, such as v5e:2x4 or v5litepod-8; again for more"),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="devices, where no --tpu says how many: 8 if left out")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="a key of the config and its value, such as bf16.enabled=true"),
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
    strict: Strict = False,
    own_stage: Annotated[
        bool, typer.Option("--own-stage", help="compile the config's stage only: faster")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="such as 30ms or 0.03s: exit with status 1 if the estimated time of a step on a "
            "--tpu is above it"
        ),
    ] = None,
    host_rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GB/s each way between a TPU and its host's memory, for what is offloaded: 16 or "
            "32 by its generation if left out",
        ),
    ] = None,
    meta: Annotated[
        bool,
        typer.Option("--meta", help="build the model on the meta device: it takes no memory"),
    ] = False,
) -> None:
    """Does a step fit, what does it move, what is wrong, how long does it take? No TPU needed."""
    most = None if budget is None else _seconds(budget, tpu)
    if host_rate is not None and not tpu:
        raise SpmdZeroUsageError(
            f"--host-rate {host_rate:g}: it counts in the time of a step, which is the TPU "
            "compiler's estimate, and no TPU is named. Add one, such as --tpu v5e:2x4"
        )

    from spmdzero.cli._explain_job import Job

    job = Job(model=model, config=config, settings=changes(setting or []), batch=batch,
              tpu=tpu or [], devices=devices, own_stage=own_stage, meta=meta,
              host_rate=None if host_rate is None else host_rate * 1e9)  # fmt: skip
    if not job.run(as_json=as_json, html=html, strict=strict, most=most):
        raise typer.Exit(1)


def _seconds(budget: str, tpu: list[str] | None) -> float:
    if not tpu:
        raise SpmdZeroUsageError(
            f"--budget {budget}: the time of a step is the TPU compiler's estimate, and no TPU is "
            "named. Add one, such as --tpu v5e:2x4"
        )
    return duration(budget)
