"""Writes a trace of chosen steps."""

import contextlib
import os
from collections.abc import Iterable, Iterator

from spmdzero.backend import programs, runtime
from spmdzero.engine import Engine
from spmdzero.errors import SpmdZeroUsageError


@contextlib.contextmanager
def profile(
    engine: Engine, *, steps: Iterable[int], folder: str | os.PathLike[str]
) -> Iterator[None]:
    """Writes a trace of these steps, of host and devices, while the block trains.

    TensorBoard's profile plugin and Perfetto show it. Leave out the first two steps, which compile.

    Args:
        engine: the engine that trains the steps.
        steps: consecutive values of `engine.global_steps` before each step, such as ``(3, 4)``
            or ``range(3, 5)``.
        folder: a folder, made if it is missing; the trace goes to ``plugins/profile/<time>/`` in
            it.

    Raises:
        SpmdZeroUsageError: the steps are not consecutive, or are over; another trace is being
            recorded; or the block ended before the first step.
    """
    wanted = list(steps)
    if not wanted or wanted != list(range(wanted[0], wanted[0] + len(wanted))):
        raise SpmdZeroUsageError(
            f"profile(steps={wanted}): one trace holds consecutive steps, such as range(3, 5)"
        )
    if wanted[0] < engine.global_steps:
        raise SpmdZeroUsageError(
            f"profile(steps={wanted}): step {engine.global_steps} is next, earlier ones are over"
        )
    recording = _Recording(engine, wanted[0], wanted[-1], folder)
    recording.between_steps()
    engine.after_step.append(recording.between_steps)
    try:
        yield
        if not recording.started:
            raise SpmdZeroUsageError(
                f"profile(steps={wanted}): the block ended at step {engine.global_steps}, before "
                "the first of them. Train further inside of it, or choose earlier steps"
            )
    finally:
        engine.after_step.remove(recording.between_steps)
        recording.stop()


class _Recording:
    def __init__(
        self, engine: Engine, first: int, last: int, folder: str | os.PathLike[str]
    ) -> None:
        self._engine, self._first, self._last, self._folder = engine, first, last, folder
        self.started, self._running = False, False

    def between_steps(self) -> None:
        steps = self._engine.global_steps
        if steps == self._first and not self.started:
            # Programs that earlier steps left running don't belong to the trace.
            runtime.wait()
            programs.start_trace(self._folder)
            self.started = self._running = True
        elif steps > self._last:
            self.stop()

    def stop(self) -> None:
        if self._running:
            self._running = False
            runtime.wait()
            programs.stop_trace()
