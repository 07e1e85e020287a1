"""What an engine reports while it trains: scalars to the monitors, throughput to the log."""

import functools
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from spmdzero.backend.torch_xla import runtime
from spmdzero.engine._engine import Engine
from spmdzero.monitor import Event, MonitorMaster

logger = logging.getLogger("spmdzero")

# Steps whose losses are read from the devices together when no line is printed.
_STEPS_PER_FLUSH = 10
# The first steps compile; DeepSpeed's ThroughputTimer leaves out as many (utils/timer.py).
_WARM_UP_STEPS = 2


def set_up_reports(engine: Engine) -> None:
    """Gives a new engine its monitors and its throughput line, and logs its state if asked to.

    Raises:
        SpmdZeroConfigError: an enabled monitor needs a package that is not installed.
    """
    config = engine.spmd_config
    first = runtime.process_index() == 0
    engine.monitor = MonitorMaster(config, writes=first)
    if engine.monitor.enabled:
        engine.after_step.append(_write_events)
    if config.steps_per_print and first:
        engine.after_step.append(Throughput(config.steps_per_print))
    if config.dump_state and first:
        _dump_state(engine)


def _write_events(engine: Engine) -> None:
    engine.monitor.write_events(step_events(engine))
    if engine.global_steps % (engine.steps_per_print() or _STEPS_PER_FLUSH) == 0:
        engine.monitor.flush()


def step_events(engine: Engine) -> list[Event]:
    """The scalars of the step that just ended, under DeepSpeed's names.

    DeepSpeed's runtime/engine.py, `step`, writes lr and, with fp16, the loss scale. The loss,
    which its documentation names, is only written by its pipeline engine; here by every engine
    whose `backward` saw one: a plain ``loss.backward()`` hands none over.
    """
    samples, losses = engine.global_samples, engine.micro_losses
    events: list[Event] = []
    if losses:
        events.append(("Train/Samples/train_loss", functools.partial(_mean, losses), samples))
    events.append(("Train/Samples/lr", engine.get_lr()[0], samples))
    if engine.fp16_enabled():
        events.append(("Train/Samples/loss_scale", engine.cur_scale, samples))
    return events


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
        every: steps between two print steps.
    """

    def __init__(self, every: int) -> None:
        self._every, self._steps = every, 0
        self._first: _Mark | None = None
        self._latest: _Mark | None = None

    def __call__(self, engine: Engine) -> None:
        """Takes note of a finished step."""
        self._steps += 1
        if self._steps == _WARM_UP_STEPS:
            self._first = self._latest = self._mark(engine)
        elif self._first and self._latest and engine.global_steps % self._every == 0:
            now = self._mark(engine)
            logger.info(
                "micro_step=%d/global_step=%d, RunningAvgSamplesPerSec=%s, CurrSamplesPerSec=%s",
                engine.micro_steps, engine.global_steps,
                _rate(self._first, now), _rate(self._latest, now),
            )  # fmt: skip
            self._latest = now

    def _mark(self, engine: Engine) -> _Mark:
        runtime.wait()
        return _Mark(time.perf_counter(), engine.global_samples)


def _rate(start: _Mark, end: _Mark) -> float:
    return (end.samples - start.samples) / (end.seconds - start.seconds)


def _dump_state(engine: Engine) -> None:
    logger.info("%s configuration:", type(engine).__name__)
    for name, value in sorted(engine.spmd_config):
        logger.info("  %s %s %r", name, "." * (32 - len(name)), value)
    logger.info("  json = %s", engine.config)
    logger.info("%s", engine.plan)
