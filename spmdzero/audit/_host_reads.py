"""Finds code that reads values from the devices, and operations that run on the CPU."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from spmdzero._dispatch_mode import DispatchMode
from spmdzero._user_line import called_by_library, user_line
from spmdzero.audit._report import Finding
from spmdzero.backend import counters, current

_ENGINE = Path(__file__).parents[1] / "engine"


@dataclass
class _Site:
    reads: int = 0
    operations: set[str] = field(default_factory=set)


class _Calls(TorchFunctionMode):
    """Watches Python's calls: a read such as `tensor.item()` is no operation on some backends."""

    def __init__(self, watch: "HostWatch") -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        with self._watch.noting(getattr(func, "__name__", str(func))):
            return func(*args, **(kwargs or {}))


class HostWatch(DispatchMode):
    """Watches each operation's effect on the backend's counters, and notes the calling line.

    Args:
        model: the model, for the name of the module whose forward makes the call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._reads: dict[str, _Site] = {}
        self._fallbacks: Counter[tuple[str, str]] = Counter()
        self._calls = _Calls(self)
        # Number of reads that are already attributed to a line.
        self._noted = 0

    def __enter__(self) -> "HostWatch":
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(  # pyrefly: ignore[bad-override]
        self, exc_type: Any, exc_val: Any, exc_tb: Any
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._calls.__exit__(exc_type, exc_val, exc_tb)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, and notes its fallback or read."""
        name = func.name().partition(".")[0]
        reads, fallbacks = counters.host_reads(), counters.fallback_calls(name)
        with self.noting(name):
            result = func(*args, **kwargs)
            if counters.fallback_calls(name) > fallbacks:
                self._fallbacks[name, self._line()] += 1
                # The reads of the fallback's own inputs are not the script's.
                self._noted += counters.host_reads() - reads
        return result

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Notes once the values that an operation or call named `name` reads inside the context."""
        before, noted = counters.host_reads(), self._noted
        yield
        reads = counters.host_reads() - before - (self._noted - noted)
        self._noted += reads
        # The reads of the engine's own step are documented.
        if reads and not called_by_library("step", _ENGINE):
            site = self._reads.setdefault(self._line(), _Site())
            site.reads += reads
            site.operations.add(name)

    def findings(self, *, steps: int) -> list[Finding]:
        """CPU fallbacks, and lines that read once per step or more."""
        found = [_fallback(name, place, n) for (name, place), n in self._fallbacks.items()]
        for place, site in self._reads.items():
            if steps and site.reads >= steps:
                found.append(_read(place, site, steps))
        return found

    def _line(self) -> str:
        return user_line(self._model, otherwise="the backward pass")


def _fallback(name: str, place: str, calls: int) -> Finding:
    return Finding(
        name="cpu-fallback",
        severity="warning",
        subject=f"{name} at {place}",
        cause=f"{current().name} has no XLA lowering of this operation: it compiles and runs what "
        "is pending, moves the inputs to the host, computes there, and moves the result back",
        fix="write it with operations that have a lowering, or keep it out of the step",
        evidence=f"{current().name}'s counter {name} rose by {calls}",
    )


def _read(place: str, site: _Site, steps: int) -> Finding:
    return Finding(
        name="host-read-in-step",
        severity="warning",
        subject=place,
        cause="Python reads a tensor's value, which ends the program there and waits for the "
        "devices, while they wait for the next program",
        fix="keep the value on the device (torch.where instead of if, a running sum instead of a "
        "float), or read it every so many steps",
        evidence=f"{site.reads} transfers from the devices in {steps} steps, by "
        f"{', '.join(sorted(site.operations))}",
    )
