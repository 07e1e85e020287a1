"""Runs `spmdzero plan`: one process for each slice, then prints their results."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from spmdzero.cli._settings import said
from spmdzero.cli._shown import put_out, told
from spmdzero.cli._worker import ask
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain import Topology
from spmdzero.search import TrainingPlan
from spmdzero.show import plans_together

_WORKER = "spmdzero.cli._plan_worker"


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search of `spmdzero plan`, with the command's arguments of these names.

    Attributes:
        settings: dotted key of the config -> the value that ``--set`` gives it.
        prices: generation -> the price of a chip for an hour.
    """

    model: str
    config: Path
    settings: dict[str, Any]
    batch: list[str]
    tpu: list[str]
    global_batch: int | None
    tokens: float | None
    prices: dict[str, float]
    programs: int

    def run(self, *, as_json: bool, html: Path | None, write: Path | None) -> bool:
        """Searches and prints; returns whether anything fits any of the slices."""
        topologies = [Topology.parse(name) for name in self.tpu]
        unknown = sorted(self.prices.keys() - {t.chip.name for t in topologies})
        if unknown:
            raise SpmdZeroUsageError(
                f"--price {unknown[0]}=...: no --tpu is of this generation, only "
                f"{', '.join(sorted({t.chip.name for t in topologies}))}"
            )
        plans = []
        for topology in topologies:
            plans += self._on(topology)
        self._print(plans, as_json=as_json, html=html)
        fitting = [plan for plan in plans if plan.best is not None]
        if fitting and write is not None:
            best = min(fitting, key=_order)
            best.write(write)
            typer.echo(f"plan: {write} is for {best.slice}", err=True)
        return bool(fitting)

    def _on(self, topology: Topology) -> Iterator[TrainingPlan]:
        """Yields the plan of a slice, and of the smallest larger one where something fits."""
        while True:
            plan = self._searched(topology)
            yield plan
            if plan.best is not None or not plan.larger:
                return
            topology = Topology.parse(plan.larger)

    def _searched(self, topology: Topology) -> TrainingPlan:
        request = {
            "model": self.model,
            "config": str(self.config),
            "settings": self.settings,
            "batch": [text.replace("{devices}", str(topology.devices)) for text in self.batch],
            "tpu": topology.name,
            "global_batch": self.global_batch,
            "tokens": self.tokens,
            "price": self.prices.get(topology.chip.name),
            "programs": self.programs,
        }
        status, answer = ask(_WORKER, request, devices=topology.devices, run=_interruptible)
        if status != 0:
            raise typer.Exit(2)
        return TrainingPlan.from_json(answer)

    def _print(self, plans: list[TrainingPlan], *, as_json: bool, html: Path | None) -> None:
        command, config = shlex.join(["spmdzero", *sys.argv[1:]]), said(self.config, self.settings)
        page = plans_together(plans, told=told(command, config))
        put_out(page, plans, as_json=as_json, html=html)


def _order(plan: TrainingPlan) -> tuple[float, float]:
    """Orders plans: the lowest price of a token, and where none is known the quickest step."""
    best = plan.best
    assert best is not None
    return best.per_million or 0.0, best.seconds or 0.0


def _interruptible(command: list[str], environment: dict[str, str]) -> int:
    """Runs a worker that answers to Ctrl-C with the best so far; a second one ends it.

    SIGTERM ends both, and the worker's compilers.
    """
    # Its log lines, which show the progress, go to this command's stderr. Ctrl-C is for this
    # process, which hands it over once, to the worker and its compilers.
    worker = subprocess.Popen(
        command, env=environment, stdout=sys.stderr.fileno(), start_new_session=True
    )

    def hand_over(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGINT)

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGINT, hand_over), signal.signal(signal.SIGTERM, end)
    try:
        return worker.wait()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
