"""The engine's record of its compiled programs, and a warning where each step compiles one."""

import contextlib
import dataclasses
import logging
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import ClassVar

from spmdzero.backend import counters, programs

logger = logging.getLogger("spmdzero")

# The first steps compile too: once without states, and again while their traces are compared.
_STEPS = 6
# The number of the latest of these steps whose programs are compared.
_COMPARED = 2
# Some versions of XLA write a % before names in the text, others don't.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (\S+) ([\w-]+)\(([^%)]*).*", re.MULTILINE)
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_NAME = re.compile(r"(%?\b[A-Za-z_][\w-]*)\.\d+")
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_LIBRARY = re.compile(r".*/site-packages/")
_SLICES = ("slice", "dynamic-slice", "gather")


class CompilingSteps:
    """Counts the steps that compiled something; warns once if many in a row did.

    Attributes:
        steps: number of steps that compiled something, including the first ones.
        in_a_row: number of the latest steps in a row that did.
        said: the warning, or None before it was given.
    """

    def __init__(self) -> None:
        self.steps = self.in_a_row = 0
        self.said: str | None = None
        self._texts: list[str] = []
        self._records = False

    def look(self, text: Callable[[], str]) -> None:
        """Records the program that is about to be compiled, if programs are to be compared."""
        if self._records:
            self._texts.append(text())

    def step_ended(self, *, own: int, elsewhere: int, change: str) -> None:
        """Takes note of a step.

        Args:
            own: number of programs compiled for the engine's own launches.
            elsewhere: number of programs compiled for the script between them.
            change: how the inputs differ from those of the step before, "" if they don't.
        """
        compiled = own + elsewhere
        self.steps += bool(compiled)
        self.in_a_row = self.in_a_row + 1 if compiled else 0
        if self.said is None and self.in_a_row == _STEPS:
            self.said = self._message(own, change)
            logger.warning("%s", self.said)
        self._record(self.said is None and self.in_a_row >= _STEPS - _COMPARED)

    def _record(self, wanted: bool) -> None:
        if wanted != self._records:
            self._records = wanted
            programs.record_scopes(wanted, by=self)
        if not wanted:
            self._texts = []

    def _message(self, own: int, change: str) -> str:
        if change:
            cause = (
                f"{change}. Give each step the same shapes and dtypes, or a few: pad, cast before "
                "the engine, drop_last"
            )
        elif not own:
            cause = (
                "the forward, or the script between the engine's calls, reads values that are "
                "computed by another program each time. Compute them on the CPU, or read them "
                "after the step; spmdzero.auditing(engine) names the lines that read"
            )
        else:
            cause = difference(*self._texts[-2:]) if len(self._texts) >= _COMPARED else _UNKNOWN
        return (
            f"each of the last {_STEPS} steps compiled a program, which takes far longer than "
            f"running it: {cause}. engine.doctor() counts them"
        )


_UNKNOWN = (
    "the same inputs give another graph each time. Keep what changes from step to step in tensors, "
    "not in Python numbers or branches"
)
_SAME = (
    "the same operations are compiled again. Either fewer programs are kept than the loop "
    "uses (XLA_COMPILATION_CACHE_SIZE), or a parameter or state is replaced by a new tensor each "
    "time: write into it in place"
)


def difference(before: str, after: str) -> str:
    """A message: where the second of two programs differs from the first, and what to do.

    Args:
        before, after: HLO as text, with the Python line of each operation.
    """
    known = [_stripped(line) for line in before.splitlines()]
    lines = after.splitlines()
    changed = [
        (old, line) for old, line in zip(known, lines, strict=False) if old != _stripped(line)
    ]
    found = [(old, line) for old, line in changed if _INSTRUCTION.match(line)]
    if not found:
        return _SAME if len(known) == len(lines) else _UNKNOWN
    # A slice or a number is the cause; values computed from it differ by shape only.
    old, new = next(((o, n) for o, n in found if _operation(n) in (*_SLICES, "constant")), found[0])
    at = f" at {_place(new)}" if _SOURCE.search(new) else ""
    was, now = (_attributes(line) for line in (old, new))
    what = f"{_operation(new)} of {_shape(new)}{at} is another each time ({was}, then {now})"
    if _operation(new) in _SLICES:
        return (
            f"{what}. Each index or slice of a tensor on the devices is a program of its own: keep "
            "the data set on the CPU, from where the engine uploads each batch, or index with a "
            "tensor (x.index_select(0, indices))"
        )
    return f"{what}. {_UNKNOWN[0].upper()}{_UNKNOWN[1:]}"


def _stripped(line: str) -> str:
    return _METADATA.sub("", _NAME.sub(r"\1", line))


def _operation(line: str) -> str:
    found = _INSTRUCTION.match(line)
    return found[2] if found else ""


def _shape(line: str) -> str:
    """The shape of an operation's result; of a slice, the shape of its operand."""
    found = re.search(r"\((\S+) %?" if _operation(line) in _SLICES else r" = (\S+) ", line)
    return found[1].split("{")[0] if found else "a tensor"


def _attributes(line: str) -> str:
    """The attributes that distinguish an operation from others of its kind: bounds, or value."""
    if "constant(" in line:
        return line.split("constant(")[1].split(")")[0]
    return ", ".join(re.findall(r"\w+=\{?\[?[^=]*?\}(?=,|$)", _stripped(line))) or "other operands"


def _place(line: str) -> str:
    found = _SOURCE.search(line)
    assert found is not None
    return f"{_LIBRARY.sub('', found[1])}:{found[2]}"


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
