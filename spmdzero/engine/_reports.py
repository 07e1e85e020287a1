"""What an engine reports while it trains: scalars to the monitors, throughput to the log."""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from spmdzero.backend.torch_xla import runtime
from spmdzero.engine._progress import Progress
from spmdzero.monitor import Event, MonitorMaster
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")

# Steps whose losses are read from the devices together when no line is printed.
_STEPS_PER_FLUSH = 10
# The first steps compile; DeepSpeed's ThroughputTimer leaves out as many (utils/timer.py).
_WARM_UP_STEPS = 2


def reports(
    training: Training, progress: Progress, monitor: MonitorMaster
) -> Iterator[Callable[[], None]]:
    """What the config wants to be told after each step; logs the engine's state if asked to."""
    config = training.spmd_config
    first = runtime.process_index() == 0
    if monitor.enabled:
        yield StepEvents(training, progress, monitor)
    if config.steps_per_print and first:
        yield Throughput(progress, every=config.steps_per_print)
    if config.dump_state and first:
        _dump_state(training)


class StepEvents:
    """Hands the scalars of each step to the monitors, under DeepSpeed's names.

    DeepSpeed's runtime/engine.py, `step`, writes lr and, with fp16, the loss scale. The loss,
    which its documentation names, is only written by its pipeline engine; here by every engine
    whose `backward` saw one: a plain ``loss.backward()`` hands none over.
    """

    def __init__(self, training: Training, progress: Progress, monitor: MonitorMaster) -> None:
        self._training, self._progress, self._monitor = training, progress, monitor

    def __call__(self) -> None:
        """Writes those of the step that just ended."""
        self._monitor.write_events(self._events())
        every = self._training.spmd_config.steps_per_print or _STEPS_PER_FLUSH
        if self._training.counters.global_steps % every == 0:
            self._monitor.flush()

    def _events(self) -> Iterator[Event]:
        samples, losses = self._progress.global_samples, self._progress.micro_losses
        if losses:
            yield "Train/Samples/train_loss", functools.partial(_mean, losses), samples
        yield "Train/Samples/lr", self._progress.get_lr()[0], samples
        if self._training.spmd_config.fp16.enabled:
            yield "Train/Samples/loss_scale", self._progress.cur_scale, samples


def _mean(losses: Sequence[torch.Tensor]) -> float:
    return sum(loss.item() for loss in losses) / len(losses)


class _Mark(NamedTuple):
    seconds: float
    samples: int


class Throughput:
    """Logs samples per second at each print step, without the first steps, which compile.

    DeepSpeed waits for the devices at every step and counts the time inside of its calls. This
    waits at print steps only and counts all time, loading of data included.

    Args:
        progress: of the engine.
        every: steps between two print steps.
    """

    def __init__(self, progress: Progress, *, every: int) -> None:
        self._progress, self._every, self._steps = progress, every, 0
        self._first: _Mark | None = None
        self._latest: _Mark | None = None

    def __call__(self) -> None:
        """Takes note of a finished step."""
        progress = self._progress
        self._steps += 1
        if self._steps == _WARM_UP_STEPS:
            self._first = self._latest = self._mark()
        elif self._first and self._latest and progress.global_steps % self._every == 0:
            now = self._mark()
            logger.info(
                "micro_step=%d/global_step=%d, RunningAvgSamplesPerSec=%s, CurrSamplesPerSec=%s",
                progress.micro_steps, progress.global_steps,
                _rate(self._first, now), _rate(self._latest, now),
            )  # fmt: skip
            self._latest = now

    def _mark(self) -> _Mark:
        runtime.wait()
        return _Mark(time.perf_counter(), self._progress.global_samples)


def _rate(start: _Mark, end: _Mark) -> float:
    return (end.samples - start.samples) / (end.seconds - start.seconds)


def _dump_state(training: Training) -> None:
    logger.info("Engine configuration:")
    for name, value in sorted(training.spmd_config):
        logger.info("  %s %s %r", name, "." * (32 - len(name)), value)
    logger.info("  json = %s", training.spmd_config.source)
    logger.info("%s", training.plan)
