"""`spmdzero explain`: whether a step fits, what it moves, what is wrong, how long it takes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spmdzero.backend import choose
from spmdzero.cli._duration import duration
from spmdzero.cli._options import AsJson, Html, Strict
from spmdzero.config import load_config
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain import Explanation, Topology, _passes, require_tpu_compiler
from spmdzero.show import together

_WORKER = "spmdzero.cli._explain_worker"
_DEFAULT_DEVICES = 8


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
        list[str] | None, typer.Option(help="a topology, such as v5e:2x4; again for more")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="devices, where no --tpu says how many: 8 if left out")
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
    meta: Annotated[
        bool,
        typer.Option("--meta", help="build the model on the meta device: it takes no memory"),
    ] = False,
) -> None:
    """Does a step fit, what does it move, what is wrong, how long does it take? No TPU needed."""
    most = None if budget is None else _seconds(budget, tpu)
    if meta and tpu and _passes.FOLDER not in os.environ:
        _start_again(config)
    explanations = [
        _explain_on(
            count,
            {
                "model": model,
                "config": str(config),
                "batch": [text.replace("{devices}", str(count)) for text in batch],
                "tpu": names,
                "stages": [] if own_stage else [0, 1, 2],
                "meta": meta,
            },
        )
        for count, names in _by_devices(tpu or [], devices).items()
    ]
    _print(explanations, as_json=as_json, html=html)
    over = [] if most is None else [line for e in explanations for line in e.over_budget(most)]
    for line in over:
        typer.echo(f"over budget: {line}", err=True)
    if over or (strict and any(e.problems for e in explanations)):
        raise typer.Exit(1)


def _seconds(budget: str, tpu: list[str] | None) -> float:
    if not tpu:
        raise SpmdZeroUsageError(
            f"--budget {budget}: the time of a step is the TPU compiler's estimate, and no TPU is "
            "named. Add one, such as --tpu v5e:2x4"
        )
    return duration(budget)


def _print(explanations: list[Explanation], *, as_json: bool, html: Path | None) -> None:
    page = together(explanations)
    if as_json:
        typer.echo(json.dumps([json.loads(e.to_json()) for e in explanations], indent=2))
    else:
        typer.echo(page.text())
    if html is not None:
        html.write_text(page.document())
    for problem in (problem for e in explanations for problem in e.problems):
        typer.echo(f"problem: {problem}", err=True)


def _start_again(config: Path) -> None:
    """Replaces this process: a model that fills memory leaves the TPU's compiler the rest of it."""
    # Each backend needs a compiler of its own, and the config may name one.
    choose(load_config(str(config)).spmd.backend)
    require_tpu_compiler()
    again = [sys.executable, "-m", "spmdzero", *sys.argv[1:]]
    # The Pythons that have this compiler have -P.
    os.execv(sys.executable, [sys.executable, "-P", str(_passes.__file__), *again])


def _by_devices(tpu: list[str], devices: int | None) -> dict[int, list[str]]:
    """Number of devices -> the topologies of that many."""
    groups: dict[int, list[str]] = {}
    if devices is not None or not tpu:
        groups[devices or _DEFAULT_DEVICES] = []
    for name in tpu:
        groups.setdefault(Topology.parse(name).devices, []).append(name)
    return groups


def _explain_on(devices: int, request: dict[str, object]) -> Explanation:
    """The explanation on so many virtual devices, which are fixed for a process's life."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        # Its log lines, the progress, go to this command's stderr.
        done = subprocess.run(
            [sys.executable, "-m", _WORKER, str(asked), str(answered)],
            env=environment,
            stdout=sys.stderr.fileno(),
            check=False,
        )
        if done.returncode != 0:
            raise typer.Exit(done.returncode if done.returncode == _passes.WAITING else 2)
        return Explanation.from_json(answered.read_text())
