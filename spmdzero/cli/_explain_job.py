"""Runs `spmdzero explain`: one process per number of devices, then prints their results."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from spmdzero.backend import choose
from spmdzero.cli._settings import said
from spmdzero.cli._shown import show
from spmdzero.cli._worker import ask
from spmdzero.config import backend_of, read, set_keys
from spmdzero.explain import Explanation, Topology, _passes, require_tpu_compiler

_WORKER = "spmdzero.cli._explain_worker"
_DEFAULT_DEVICES = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of `spmdzero explain`, with the command's arguments of these names.

    Attributes:
        settings: dotted key of the config -> the value that ``--set`` gives it.
        host_rate: bytes per second each way between a TPU and its host; None if not given.
    """

    model: str
    config: Path
    settings: dict[str, Any]
    batch: list[str]
    tpu: list[str]
    devices: int | None
    own_stage: bool
    meta: bool
    host_rate: float | None

    def run(self, *, as_json: bool, html: Path | None, strict: bool, most: float | None) -> bool:
        """Explains and prints; returns whether the step satisfies `strict` and `most`.

        Args:
            as_json, html, strict: the command's options.
            most: largest time of a step in seconds, or None.
        """
        if self.meta and self.tpu and _passes.FOLDER not in os.environ:
            _start_again(set_keys(read(self.config), self.settings))
        explanations = [_explain_on(n, self._request(n, tpu)) for n, tpu in self._groups().items()]
        self._print(explanations, as_json=as_json, html=html)
        over = False if most is None else _over_budget(explanations, most)
        return not over and not (strict and any(e.problems for e in explanations))

    def _groups(self) -> dict[int, list[str]]:
        """Number of devices -> the topologies with this number."""
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
            "settings": self.settings,
            "batch": [text.replace("{devices}", str(devices)) for text in self.batch],
            "tpu": tpu,
            "stages": [] if self.own_stage else [0, 1, 2],
            "meta": self.meta,
            "host_rate": self.host_rate if tpu else None,
        }

    def _print(self, explanations: list[Explanation], *, as_json: bool, html: Path | None) -> None:
        command, config = shlex.join(["spmdzero", *sys.argv[1:]]), said(self.config, self.settings)
        show(explanations, command=command, config=config, as_json=as_json, html=html)


def _over_budget(explanations: list[Explanation], most: float) -> bool:
    over = [line for e in explanations for line in e.over_budget(most)]
    for line in over:
        typer.echo(f"over budget: {line}", err=True)
    for time in (time for e in explanations for time in e.times if time.seconds <= most):
        typer.echo(
            f"within budget: {time.target}: a step takes {1e3 * time.seconds:,.3f} ms of "
            f"{1e3 * most:,.3f} ms",
            err=True,
        )
    return bool(over)


def _start_again(config: dict[str, Any]) -> None:
    """Replaces this process by `_passes`, so that its memory is free for the TPU's compiler."""
    # Each backend needs its own compiler, and the config may name the backend.
    choose(backend_of(config))
    require_tpu_compiler()
    again = [sys.executable, "-m", "spmdzero", *sys.argv[1:]]
    # All Pythons with this compiler have the option -P.
    os.execv(sys.executable, [sys.executable, "-P", str(_passes.__file__), *again])


def _explain_on(devices: int, request: dict[str, object]) -> Explanation:
    """The explanation on `devices` virtual devices."""
    status, answer = ask(_WORKER, request, devices=devices, run=_waited_for)
    if status != 0:
        raise typer.Exit(status if status == _passes.WAITING else 2)
    return Explanation.from_json(answer)


def _waited_for(command: list[str], environment: dict[str, str]) -> int:
    # The worker's log lines, which show the progress, go to this command's stderr.
    return subprocess.run(
        command, env=environment, stdout=sys.stderr.fileno(), check=False
    ).returncode
