"""The engine's record of its compiled programs: the inputs it saw, and when it compiled."""

import contextlib
import dataclasses
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import ClassVar

from spmdzero.backend import counters
from spmdzero.engine._compiling import CompilingSteps

# Largest number of compilations that are kept, for scripts that recompile at every step.
_KEPT = 256
# Largest number of combinations of calls that are remembered: forwards of a few lengths make ever
# new combinations, for example evaluations between two steps.
_REMEMBERED = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The properties of one forward that decide which program runs it.

    Attributes:
        inputs: path, global shape and dtype of each tensor that was passed to the module.
        training: the module's mode.
        gradients: whether autograd recorded.
    """

    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    training: bool
    gradients: bool


def changed_calls(old: tuple[Call, ...], new: tuple[Call, ...]) -> str:
    """How the calls of two micro-batches differ, "" if they don't."""
    if len(old) != len(new):
        return f"{len(new)} different forwards in one micro-batch after {len(old)}"
    said: list[str] = []
    for before, after in zip(old, new, strict=True):
        if before.training != after.training:
            said.append(f"the module is in {'train' if after.training else 'eval'} mode")
        if before.gradients != after.gradients:
            said.append(f"autograd is {'on' if after.gradients else 'off'}")
        was, now = ({path: rest for path, *rest in call.inputs} for call in (before, after))
        for path in sorted(was.keys() | now.keys()):
            if was.get(path) != now.get(path):
                said.append(f"input {path!r}: {_shown(was.get(path))} -> {_shown(now.get(path))}")
    return ", ".join(said)


def _shown(seen: list | None) -> str:
    if seen is None:
        return "absent"
    shape, dtype = seen
    return f"{dtype}{list(shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """Programs that were compiled for one launch.

    Attributes:
        step: `engine.global_steps` at that time.
        kind: ``"micro"`` or ``"boundary"`` for the engine's own program, after ``"captured "`` if
            it has the forward as one operation; ``"forward"`` for programs compiled between the
            first forward and the launch because Python read a value.
        calls: the forwards since the launch before.
        count: number of programs.
        seconds: seconds that compiling took.
        known: whether these calls had been launched before, so that no input explains the
            compilation. The latest 1,024 combinations are remembered.
    """

    step: int
    kind: str
    calls: tuple[Call, ...]
    count: int
    seconds: float
    known: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compilations of the runtime up to a moment, or between two moments.

    Attributes:
        count: number of programs.
        seconds: seconds that compiling them took.
    """

    count: int = 0
    seconds: float = 0.0

    @classmethod
    def so_far(cls) -> "Compiled":
        """The compilations of this process so far."""
        count, seconds = counters.compiled()
        return cls(count=count, seconds=seconds)

    def __add__(self, other: "Compiled") -> "Compiled":
        return Compiled(count=self.count + other.count, seconds=self.seconds + other.seconds)

    def __sub__(self, other: "Compiled") -> "Compiled":
        return Compiled(count=self.count - other.count, seconds=self.seconds - other.seconds)


class ProgramLog:
    """Notes each launch of an engine's programs; costs a few microseconds a step.

    Attributes:
        initial: the compilation of the program that made the states, by `initialize`.
        compilations: the latest 256 launches that compiled something.
        launches: number of launched micro-batches.
        compiling: counts the steps that compiled something, and warns if many in a row did.
        engine_reads: number of values that `engine.step` itself read: fp16's overflow,
            `check_finite`, printed lines.
    """

    # Shared by all engines, because the runtime counts for the whole process.
    _launched: ClassVar[Compiled] = Compiled()

    def __init__(self) -> None:
        self.compilations: deque[Compilation] = deque(maxlen=_KEPT)
        self.initial = Compiled()
        self.launches = self.engine_reads = self._script_reads = 0
        self._calls: dict[Call, None] = {}
        # The latest combinations, in the order of their latest launch.
        self._seen: OrderedDict[tuple[str, tuple[Call, ...]], None] = OrderedDict()
        self._window: Compiled | None = None
        self._reads_before: int | None = None
        self.compiling = CompilingSteps()
        self._own = 0
        # The latest step's calls, and the compilations outside of launches up to then.
        self._latest: tuple[tuple[Call, ...], Compiled] | None = None

    @property
    def script_reads(self) -> int:
        """Number of values that the script's or the module's code has read from the devices."""
        before = self._reads_before
        return self._script_reads + (counters.host_reads() - before if before is not None else 0)

    def called(self, call: Call) -> None:
        """Takes note of a forward that is about to be traced."""
        if self._window is None:
            self._window = self._elsewhere()
        if self._reads_before is None:
            self._reads_before = counters.host_reads()
        self._calls[call] = None

    def is_new(self, kind: str) -> bool:
        """Whether a launch of this kind with these calls is not among the latest 1,024."""
        return (kind, tuple(self._calls)) not in self._seen

    def launching(self, step: int) -> None:
        """Takes note that the engine is about to compile and start the pending program."""
        self._script_reads += self._reads_since()
        if self._window is not None:
            elsewhere = self._elsewhere()
            self._note("forward", step, elsewhere - self._window)
            self._window = elsewhere

    def launched(self, kind: str, step: int, compiled: Compiled) -> None:
        """Takes note of a launch and of its compilations."""
        ProgramLog._launched = ProgramLog._launched + compiled
        self._note(kind, step, compiled)
        self.launches += 1
        self._own += compiled.count
        if kind.endswith("boundary"):
            self._end_step()
        self._calls, self._window = {}, None

    def not_the_scripts(self, compiled: Compiled) -> None:
        """Takes note of compilations made to observe a step, or to make room for programs."""
        ProgramLog._launched = ProgramLog._launched + compiled

    def _end_step(self) -> None:
        calls, elsewhere = tuple(self._calls), self._elsewhere()
        before, then = self._latest or (calls, elsewhere)
        between = (elsewhere - then).count
        # Most steps compile nothing, and their calls are not compared.
        change = changed_calls(before, calls) if self._own or between else ""
        self.compiling.step_ended(own=self._own, elsewhere=between, change=change)
        self._own, self._latest = 0, (calls, elsewhere)

    def stepped(self) -> None:
        """Takes note of the end of `engine.step`, which made the reads since the launch."""
        self.engine_reads += self._reads_since()

    @contextlib.contextmanager
    def own_reads(self) -> Iterator[None]:
        """Counts the reads inside of the context as the engine's, not as the script's."""
        self._script_reads += self._reads_since()
        try:
            yield
        finally:
            self.engine_reads += self._reads_since()

    def _reads_since(self) -> int:
        before, self._reads_before = self._reads_before, counters.host_reads()
        return 0 if before is None else self._reads_before - before

    def _note(self, kind: str, step: int, compiled: Compiled) -> None:
        calls = tuple(self._calls)
        if compiled.count:
            self.compilations.append(
                Compilation(
                    step=step,
                    kind=kind,
                    calls=calls,
                    count=compiled.count,
                    seconds=compiled.seconds,
                    known=(kind, calls) in self._seen,
                )
            )
        if compiled.count or kind != "forward":
            self._seen[kind, calls] = None
            self._seen.move_to_end((kind, calls))
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)

    def _elsewhere(self) -> Compiled:
        return Compiled.so_far() - ProgramLog._launched


logger = logging.getLogger("spmdzero")
LONG = 5.0
"""Seconds of compiling after which a log line explains the silence."""


@contextlib.contextmanager
def explained(what: str, *, often: str = "", new: bool = True) -> Iterator[None]:
    """Surrounds a possible compilation: logs a line after `LONG` seconds, and its time at the end.

    A separate thread logs the line, as the compiler blocks the thread that calls it.

    Args:
        what: the name of what is compiled, such as ``"the step"``.
        often: a phrase for how often it is compiled.
        new: whether it is compiled for the first time. Nothing is logged otherwise: a known program
            may only wait for the programs before it.
    """
    if not new:
        yield
        return
    said = f"compiling {what}{often and ', '}{often} ..."
    timer = threading.Timer(LONG, _say, args=(said,))
    timer.daemon = True
    before = Compiled.so_far()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Without the wait, the timer's line could appear after the next one.
        timer.join()
        compiled = Compiled.so_far() - before
        if compiled.count and compiled.seconds >= LONG:
            logger.info("compiled %s in %.1f s", what, compiled.seconds)


def _say(line: str) -> None:
    # A function of this package logs the line, as hosts after the first leave out its lines.
    logger.info("%s", line)
