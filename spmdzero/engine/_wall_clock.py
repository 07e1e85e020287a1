"""How long forward, backward and step take: ``"wall_clock_breakdown": true``."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator

from spmdzero.backend.torch_xla import runtime
from spmdzero.monitor import MonitorMaster
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")

_EVENTS = {"fwd": "forward", "bwd": "backward", "step": "step"}


class WallClock:
    """Logs how long the three calls take, after each micro-batch and each boundary, if asked to.

    Tensors are lazy: ``fwd`` and ``bwd`` are the milliseconds that Python takes to trace them, and
    ``step`` those that all of the micro-batch takes to run on the devices, which it waits for.
    DeepSpeed's ``bwd_inner`` and ``bwd_allreduce`` have no counterpart: the reduction is inside
    the compiled program. The lines are those of DeepSpeed's utils/timer.py.

    Args:
        training: whose calls.
        monitor: is handed the times of each step.
    """

    def __init__(self, training: Training, monitor: MonitorMaster) -> None:
        self._training, self._monitor = training, monitor
        self._wanted = training.spmd_config.wall_clock_breakdown
        self._running: dict[str, float] = {}
        self._latest: dict[str, float] = {}

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds by phase: ``"fwd_microstep"``... of the latest micro-batch, ``"fwd"``... of
        the micro-batches since the latest boundary. Empty without `wall_clock_breakdown`.
        """
        return dict(self._latest)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around one of the calls: ``"fwd"``, ``"bwd"`` or ``"step"``."""
        if not self._wanted:
            yield
            return
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
        # Taking a time out starts its timer anew.
        times = [(name, self._running.pop(name)) for name in names if name in self._running]
        if runtime.process_index() == 0:
            shown = "".join(f" | {name}: {elapsed:.2f}" for name, elapsed in times)
            logger.info("[Rank 0] time (ms)%s", shown)
