"""What `spmdzero explain` does: a process for each number of devices, then what they found."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import typer

from spmdzero.backend import choose
from spmdzero.config import load_config
from spmdzero.explain import Explanation, Topology, _passes, require_tpu_compiler
from spmdzero.show import together

_WORKER = "spmdzero.cli._explain_worker"
_DEFAULT_DEVICES = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is explained: the command's arguments of these names."""

    model: str
    config: Path
    batch: list[str]
    tpu: list[str]
    devices: int | None
    own_stage: bool
    meta: bool

    def run(self, *, as_json: bool, html: Path | None, strict: bool, most: float | None) -> bool:
        """Explains and prints; returns whether what was asked of the step holds.

        Args:
            as_json, html, strict: the command's options.
            most: seconds that a step may take.
        """
        if self.meta and self.tpu and _passes.FOLDER not in os.environ:
            _start_again(self.config)
        explanations = [_explain_on(n, self._request(n, tpu)) for n, tpu in self._groups().items()]
        _print(explanations, as_json=as_json, html=html)
        over = [] if most is None else [line for e in explanations for line in e.over_budget(most)]
        for line in over:
            typer.echo(f"over budget: {line}", err=True)
        return not over and not (strict and any(e.problems for e in explanations))

    def _groups(self) -> dict[int, list[str]]:
        """Number of devices -> the topologies of that many."""
        groups: dict[int, list[str]] = {}
        if self.devices is not None or not self.tpu:
            groups[self.devices or _DEFAULT_DEVICES] = []
        for name in self.tpu:
            groups.setdefault(Topology.parse(name).devices, []).append(name)
        return groups

    def _request(self, devices: int, tpu: list[str]) -> dict[str, object]:
        return {
            "model": self.model,
            "config": str(self.config),
            "batch": [text.replace("{devices}", str(devices)) for text in self.batch],
            "tpu": tpu,
            "stages": [] if self.own_stage else [0, 1, 2],
            "meta": self.meta,
        }


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
