"""One writer for all monitors, which reads numbers from the devices as late as possible."""

import weakref
from collections.abc import Callable, Iterable

from spmdzero.config import SpmdZeroConfig
from spmdzero.monitor._writers import (
    CometMonitor,
    CsvMonitor,
    TensorBoardMonitor,
    WandbMonitor,
    Writer,
)

Event = tuple[str, float | Callable[[], float], int]
"""Name, value, samples; for a value on the devices it has a function that reads the value."""


class MonitorMaster:
    """Hands events to every monitor that the config enables (DeepSpeed's monitor/monitor.py).

    Reading a number from a device waits for the step that computes it. Events with such a number
    are held, in order, until `flush` or the end of the process; the files are then the same as if
    each had been written at once.

    Args:
        config: a config, with the sections ``tensorboard``, ``wandb``,
            ``csv_monitor`` and ``comet``.
        writes: whether this process writes; one process of a run does.

    Raises:
        SpmdZeroConfigError: an enabled monitor needs a package that is not installed.
    """

    def __init__(self, config: SpmdZeroConfig, *, writes: bool = True) -> None:
        self._writers: list[Writer] = []
        if writes and config.tensorboard.enabled:
            self._writers.append(TensorBoardMonitor(config.tensorboard))
        if writes and config.wandb.enabled:
            self._writers.append(WandbMonitor(config.wandb))
        if writes and config.csv_monitor.enabled:
            self._writers.append(CsvMonitor(config.csv_monitor))
        if writes and config.comet.enabled:
            self._writers.append(CometMonitor(config.comet))
        self._held: list[Event] = []
        self._end = weakref.finalize(self, _finish, self._held, self._writers)

    @property
    def enabled(self) -> bool:
        """Whether this process writes to any monitor."""
        return bool(self._writers)

    def write_events(self, events: Iterable[Event]) -> None:
        """Writes events after all earlier ones, at once unless a number has to be read."""
        if not self.enabled:
            return
        self._held += events
        if not any(callable(value) for _, value, _ in self._held):
            self.flush()

    def flush(self) -> None:
        """Reads and writes the held events."""
        _write(self._held, self._writers)

    def close(self) -> None:
        """Writes the held events and closes the monitors, as the end of the process does too."""
        self._end()
        self._writers = []


def _write(held: list[Event], writers: list[Writer]) -> None:
    scalars = [
        (name, float(value() if callable(value) else value), samples)
        for name, value, samples in held
    ]
    held.clear()
    if scalars:
        for writer in writers:
            writer.write(scalars)


def _finish(held: list[Event], writers: list[Writer]) -> None:
    _write(held, writers)
    for writer in writers:
        writer.close()
