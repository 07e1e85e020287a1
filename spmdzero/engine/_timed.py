"""An engine that times its phases: ``"wall_clock_breakdown": true``."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from spmdzero.backend.torch_xla import runtime
from spmdzero.engine._engine import Engine

logger = logging.getLogger("spmdzero")

_PHASES = ("fwd", "bwd", "step")
_EVENTS = {"fwd": "forward", "bwd": "backward", "step": "step"}


class TimedEngine(Engine):
    """Logs how long forward, backward and step take, after each micro-batch and each boundary.

    Tensors are lazy: ``fwd`` and ``bwd`` are the milliseconds that Python takes to trace them, and
    ``step`` those that all of the micro-batch takes to run on the devices, which `step` waits for.
    DeepSpeed's ``bwd_inner`` and ``bwd_allreduce`` have no counterpart: the reduction is inside
    the compiled program. The lines are those of DeepSpeed's utils/timer.py.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._milliseconds: dict[str, float] = {}
        self._wall_clock: dict[str, float] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `Engine.forward`."""
        with self._phase("fwd"):
            return super().forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Engine.backward`."""
        with self._phase("bwd"):
            return super().backward(loss, *args, **kwargs)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As `Engine.step`; waits for the devices and logs the times."""
        steps = self.global_steps
        with self._phase("step"):
            super().step(lr_kwargs)
            runtime.wait()
        self._wall_clock = dict(self._milliseconds)
        self._log(f"{phase}_microstep" for phase in _PHASES)
        if self.global_steps > steps:
            self.monitor.write_events(
                (
                    f"Train/Samples/elapsed_time_ms_{event}",
                    self._milliseconds.get(phase, 0.0),
                    self.global_samples,
                )
                for phase, event in _EVENTS.items()
            )
            self._log(_PHASES)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds by phase: ``"fwd_microstep"``... of the latest micro-batch, ``"fwd"``... of
        the micro-batches since the latest boundary.
        """
        return dict(self._wall_clock)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        elapsed = (time.perf_counter() - start) * 1000
        for timer in (f"{name}_microstep", name):
            self._milliseconds[timer] = self._milliseconds.get(timer, 0.0) + elapsed

    def _log(self, names: Iterable[str]) -> None:
        # Taking a time out starts its timer anew.
        times = [
            (name, self._milliseconds.pop(name)) for name in names if name in self._milliseconds
        ]
        if runtime.process_index() == 0:
            shown = "".join(f" | {name}: {elapsed:.2f}" for name, elapsed in times)
            logger.info("[Rank 0] time (ms)%s", shown)
