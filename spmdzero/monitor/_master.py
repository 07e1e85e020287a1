"""One writer in front of all monitors, which reads numbers from the devices as late as it can."""

import weakref
from collections.abc import Callable, Iterable

from spmdzero.config import SpmdZeroConfig
from spmdzero.monitor._base import Monitor, Scalar
from spmdzero.monitor._csv import CsvMonitor
from spmdzero.monitor._tensorboard import TensorBoardMonitor
from spmdzero.monitor._wandb import WandbMonitor

Event = tuple[str, float | Callable[[], float], int]
"""A `Scalar` whose value may still have to be read from the devices: a callable reads it."""

_Held = list[Event]


class MonitorMaster:
    """Hands events to every monitor that the config enables (DeepSpeed's monitor/monitor.py).

    Reading a number from a device waits for the step that computes it. Events with such a number
    are held, in order, until `flush` or the end of the process; the files are then the same as if
    each had been written at once.

    Args:
        config: its sections ``tensorboard``, ``wandb`` and ``csv_monitor``.
        writes: whether this process writes; one of a run's does.

    Raises:
        SpmdZeroConfigError: an enabled monitor needs a package that is not installed.
    """

    def __init__(self, config: SpmdZeroConfig, *, writes: bool = True) -> None:
        self._monitors: list[Monitor] = []
        if writes and config.tensorboard.enabled:
            self._monitors.append(TensorBoardMonitor(config.tensorboard))
        if writes and config.wandb.enabled:
            self._monitors.append(WandbMonitor(config.wandb))
        if writes and config.csv_monitor.enabled:
            self._monitors.append(CsvMonitor(config.csv_monitor))
        self._held: _Held = []
        self._end = weakref.finalize(self, _finish, self._held, self._monitors)

    @property
    def enabled(self) -> bool:
        """Whether this process writes anywhere."""
        return bool(self._monitors)

    def write_events(self, events: Iterable[Event]) -> None:
        """Writes events after all earlier ones; at once unless a number has to be read."""
        if not self.enabled:
            return
        self._held += events
        if not any(callable(value) for _, value, _ in self._held):
            self.flush()

    def flush(self) -> None:
        """Reads and writes what is held."""
        _write(self._held, self._monitors)

    def close(self) -> None:
        """Writes what is held and ends the records; the end of the process does it too."""
        self._end()
        self._monitors = []


def _write(held: _Held, monitors: list[Monitor]) -> None:
    scalars: list[Scalar] = [
        (name, float(value() if callable(value) else value), samples)
        for name, value, samples in held
    ]
    held.clear()
    if scalars:
        for monitor in monitors:
            monitor.write(scalars)


def _finish(held: _Held, monitors: list[Monitor]) -> None:
    _write(held, monitors)
    for monitor in monitors:
        monitor.close()
