"""Reports of an engine while it trains: scalars, throughput, how long its calls take."""

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from spmdzero.backend import runtime
from spmdzero.engine._progress import Progress
from spmdzero.monitor import Event, MonitorMaster
from spmdzero.state._counters import Counters
from spmdzero.state._training import Training
from spmdzero.step._optimizer import ZeroOptimizer
from spmdzero.step._schedule_hold import HeldPosition, ScheduleHold

logger = logging.getLogger("spmdzero")

# Number of steps whose losses are read from the devices together if no line is printed.
_STEPS_PER_FLUSH = 10
# The first steps compile; DeepSpeed's ThroughputTimer leaves out as many (utils/timer.py).
_WARM_UP_STEPS = 2
_UNMEASURED = contextlib.nullcontext()
# Timed phases, and their names in a monitor.
_EVENTS = {"fwd": "forward", "bwd": "backward", "step": "step"}


def reports(
    training: Training, progress: Progress, monitor: MonitorMaster
) -> Iterator[Callable[[], None]]:
    """Yields the reports that the config asks for after each step; may log the engine's state."""
    config = training.spmd_config
    first = runtime.process_index() == 0
    if monitor.enabled:
        yield StepEvents(training, progress, monitor)
    if config.steps_per_print and first:
        yield Throughput(training.counters, every=config.steps_per_print)
    if config.dump_state and first:
        _dump_state(training)


class StepEvents:
    """Hands the scalars of each step to the monitors, under DeepSpeed's names.

    DeepSpeed's runtime/engine.py, `step`, writes lr and, with fp16, the loss scale. Its
    documentation names the loss too, which only its pipeline engine writes. Here every engine
    writes it whose `backward` was called; a plain ``loss.backward()`` hands no loss over.
    """

    def __init__(self, training: Training, progress: Progress, monitor: MonitorMaster) -> None:
        self._training, self._progress, self._monitor = training, progress, monitor
        self._rates = _HeldRates(training)

    def __call__(self) -> None:
        """Writes the scalars of the step that just ended."""
        self._monitor.write_events(self._events())
        every = self._training.spmd_config.steps_per_print or _STEPS_PER_FLUSH
        if self._training.counters.global_steps % every == 0:
            self._monitor.flush()

    def _events(self) -> Iterator[Event]:
        samples, losses = self._training.counters.global_samples, self._progress.micro_losses
        if losses:
            yield "Train/Samples/train_loss", functools.partial(_mean, losses), samples
        yield "Train/Samples/lr", self._lr(), samples
        if self._training.spmd_config.fp16.enabled:
            yield "Train/Samples/loss_scale", self._progress.cur_scale, samples

    def _lr(self) -> float | Callable[[], float]:
        optimizer = self._training.optimizer
        if self._training.knows_skips or optimizer is None or optimizer.hold is None:
            return self._progress.get_lr()[0]
        return self._rates.note(optimizer, optimizer.hold)


@dataclasses.dataclass(kw_only=True, eq=False)
class _HeldRate:
    """The lr of one step.

    Attributes:
        norm: norm of the step's gradients, infinity if it was skipped; 0-dim on the devices.
        position: position of the schedule after the step.
        skipped: number of steps skipped up to there, None until it is read.
    """

    norm: torch.Tensor
    position: HeldPosition
    skipped: int | None = None


class _HeldRates:
    """The lr of steps, before it is read which steps were skipped.

    A skipped step holds the schedule back. The total number of skipped steps is read once, when the
    first lr is asked for; if it has grown, the norms tell which steps were skipped.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._waiting: list[_HeldRate] = []
        self._total = 0

    def note(self, optimizer: ZeroOptimizer, hold: ScheduleHold) -> Callable[[], float]:
        """A function that reads the lr after the step that just ended."""
        assert optimizer.grad_norm is not None
        rate = _HeldRate(
            norm=optimizer.grad_norm.detach(), position=hold.position(optimizer.param_groups)
        )
        self._waiting.append(rate)
        return functools.partial(self._read, rate)

    def _read(self, rate: _HeldRate) -> float:
        if rate.skipped is None:
            self._count()
        assert rate.skipped is not None
        return float(rate.position.groups_after(rate.skipped)[0]["lr"])

    def _count(self) -> None:
        before, self._total = self._total, self._training.skipped_steps
        skipped = self._total
        for rate in reversed(self._waiting):
            rate.skipped = skipped
            if self._total != before:
                skipped -= rate.norm.item() == math.inf
        self._waiting.clear()


def _mean(losses: Sequence[torch.Tensor]) -> float:
    return sum(loss.item() for loss in losses) / len(losses)


class _Mark(NamedTuple):
    seconds: float
    samples: int


class Throughput:
    """Logs samples per second at each print step, without the first steps, which compile.

    DeepSpeed waits for the devices at every step and counts the time inside of its calls. This
    class waits at print steps only and counts all time, including the loading of data.

    Args:
        counters: the counters of the engine.
        every: number of steps between two print steps.
    """

    def __init__(self, counters: Counters, *, every: int) -> None:
        self._counters, self._every, self._steps = counters, every, 0
        self._first: _Mark | None = None
        self._latest: _Mark | None = None

    def __call__(self) -> None:
        """Takes note of a finished step."""
        counters = self._counters
        self._steps += 1
        if self._steps == _WARM_UP_STEPS:
            self._first = self._latest = self._mark()
        elif self._first and self._latest and counters.global_steps % self._every == 0:
            now = self._mark()
            logger.info(
                "micro_step=%d/global_step=%d, RunningAvgSamplesPerSec=%s, CurrSamplesPerSec=%s",
                counters.micro_steps, counters.global_steps,
                _rate(self._first, now), _rate(self._latest, now),
            )  # fmt: skip
            self._latest = now

    def _mark(self) -> _Mark:
        runtime.wait()
        return _Mark(time.perf_counter(), self._counters.global_samples)


def _rate(start: _Mark, end: _Mark) -> float:
    return (end.samples - start.samples) / (end.seconds - start.seconds)


def _dump_state(training: Training) -> None:
    logger.info("Engine configuration:")
    for name, value in sorted(training.spmd_config):
        logger.info("  %s %s %r", name, "." * (32 - len(name)), value)
    logger.info("  json = %s", training.spmd_config.source)
    logger.info("%s", training.plan)


class WallClock:
    """Logs how long the three calls take, after each micro-batch and boundary, if asked to.

    Tensors are lazy: ``fwd`` and ``bwd`` are the milliseconds that Python takes to trace these
    calls, and ``step`` the milliseconds that the whole micro-batch takes to run on the devices, for
    which it waits. DeepSpeed's ``bwd_inner`` and ``bwd_allreduce`` have no counterpart: the
    reduction is inside the compiled program. The lines are those of DeepSpeed's utils/timer.py.

    Args:
        training: the training of the engine.
        monitor: takes the times of each step.
    """

    def __init__(self, training: Training, monitor: MonitorMaster) -> None:
        self._training, self._monitor = training, monitor
        self._wanted = training.spmd_config.wall_clock_breakdown
        self._running: dict[str, float] = {}
        self._latest: dict[str, float] = {}

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Phase -> milliseconds; empty without `wall_clock_breakdown`.

        ``"fwd_microstep"`` and so on are times of the latest micro-batch, ``"fwd"`` and so on of
        the micro-batches since the latest boundary.
        """
        return dict(self._latest)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measures the time of one of the calls: ``"fwd"``, ``"bwd"`` or ``"step"``."""
        return self._measured(name) if self._wanted else _UNMEASURED

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        steps, start = self._training.counters.global_steps, time.perf_counter()
        yield
        if name == "step":
            runtime.wait()
        elapsed = (time.perf_counter() - start) * 1000
        for timer in (f"{name}_microstep", name):
            self._running[timer] = self._running.get(timer, 0.0) + elapsed
        if name == "step":
            self._report(boundary=self._training.counters.global_steps > steps)

    def _report(self, *, boundary: bool) -> None:
        self._latest = dict(self._running)
        self._log(f"{phase}_microstep" for phase in _EVENTS)
        if boundary:
            samples = self._training.counters.global_samples
            self._monitor.write_events(
                (
                    f"Train/Samples/elapsed_time_ms_{event}",
                    self._running.get(phase, 0.0),
                    samples,
                )
                for phase, event in _EVENTS.items()
            )
            self._log(_EVENTS)

    def _log(self, names: Iterable[str]) -> None:
        # Removing a time restarts its timer.
        times = [(name, self._running.pop(name)) for name in names if name in self._running]
        if runtime.process_index() == 0:
            shown = "".join(f" | {name}: {elapsed:.2f}" for name, elapsed in times)
            logger.info("[Rank 0] time (ms)%s", shown)
