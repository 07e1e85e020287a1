"""Holding Ctrl-C, and other signals of Python's, while a step can't be left.

A handler that raises, as that of Ctrl-C does, may do so between any two lines. Between the line
that gives buffers of the state away and the one that puts the new ones in their place the state
would be lost; between that and the count of the step it would be a step ahead of its count.
"""

import _signal  # type: ignore[missing-import]
import inspect
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# Those that scripts and torch's loaders have handlers for. Profilers' signals aren't among them:
# their handlers look at the line that they come at.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGBREAK")
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
# What `signal` is around: its names of handlers and signals take 10 times as long as the call.
_get, _set = _signal.getsignal, _signal.signal
# So many presses of Ctrl-C mean that whoever presses doesn't want to wait for the end of a step.
_INSISTING = 3


class _Handler:
    """In the place of a handler while signals are held.

    Args:
        own: the handler that it calls, at once where they aren't.
    """

    def __init__(self, own: Callable[[int, FrameType | None], Any]) -> None:
        self.own = own

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not _section.depth or _section.insists(number):
            _section.call(self, number, frame)


class _Section:
    """The main thread's, the only one that Python runs handlers in.

    Attributes:
        depth: how many `held` are around the line that runs, within the innermost `let_in`.
        inside: how many `let_in` are.
        installed: whether handlers are in the place of others.
        raised: whether a handler has raised in the outermost section.
    """

    def __init__(self) -> None:
        self.depth, self.inside, self.installed, self.raised = 0, 0, False, False
        self._noted: dict[int, int] = {}
        self._handlers: dict[int, _Handler] = {}

    def insists(self, number: int) -> bool:
        """Takes note of a signal; whether it is a Ctrl-C that came too often to wait any longer."""
        self._noted[number] = count = self._noted.get(number, 0) + 1
        insists = number == signal.SIGINT and count == _INSISTING
        if insists:
            del self._noted[number]
        return insists

    def install(self) -> None:
        """Puts a handler of its own in the place of each, and begins the outermost section."""
        try:
            for number in _NUMBERS:
                own = _get(number)
                if callable(own) and not isinstance(own, _Handler):
                    handler = self._handlers.get(number)
                    if handler is None or handler.own is not own:
                        handler = self._handlers[number] = _Handler(own)
                    _set(number, handler)
            self.installed, self.raised = True, False
            self.depth = 1
        except BaseException:
            # One that isn't held yet has raised.
            self._uninstall()
            raise

    def _uninstall(self) -> None:
        self.installed = False
        for number in self._handlers:
            # Somebody may have set another one inside.
            if isinstance(found := _get(number), _Handler):
                _set(number, found.own)

    def call(self, handler: _Handler, number: int, frame: FrameType | None) -> None:
        """Calls what `handler` is in the place of."""
        try:
            handler.own(number, frame)
        except BaseException:
            self.raised = True
            raise

    def deliver(self) -> None:
        """Calls the handlers of what was noted."""
        while self._noted:
            number, _ = self._noted.popitem()
            try:
                self.call(self._handlers[number], number, inspect.currentframe())
            finally:
                self.deliver()

    def leave(self, *, outermost: bool) -> None:
        """Ends a section that is in no other one."""
        try:
            self.deliver()
            self.depth = 0
            if outermost:
                self._uninstall()
            # What came in between.
            self.deliver()
        finally:
            self.depth = 0
            if outermost:
                self._uninstall()

    def forget(self) -> None:
        """In a fork, whose main thread is another one's: nothing is held there."""
        self.depth = self.inside = 0
        self._noted.clear()


_section = _Section()
os.register_at_fork(after_in_child=_section.forget)


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class _Held:
    __slots__ = ("_before", "_undo")

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo
        self._before: tuple[int, int] | None = None

    def __enter__(self) -> None:
        if _is_main():
            self._before = _section.depth, _section.inside
            if _section.installed:
                _section.depth += 1
            else:
                _section.install()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before is None:
            return
        # Set, and not counted down: a `let_in` may have been left before its end could begin.
        depth, inside = self._before
        _section.depth, _section.inside = depth or 1, inside
        if depth:
            return
        try:
            if kind is not None and _section.raised and not inside:
                self._undo()
            _section.leave(outermost=not inside)
        except BaseException:
            if not inside:
                self._undo()
            raise


class _LetIn:
    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None

    def __enter__(self) -> None:
        if _section.installed and _is_main():
            self._before = _section.depth, _section.inside
            _section.deliver()
            _section.inside += 1
            _section.depth = 0

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _section.depth, _section.inside = self._before


def held(undo: Callable[[], None] = lambda: None) -> _Held:
    """Around what can't be left: handlers of signals are called where the outermost of these ends.

    A handler that raises raises there. So does the third Ctrl-C of one section, wherever it comes.
    In other threads than the main one, which handlers never interrupt, it does nothing.

    Args:
        undo: called where an exception of a handler leaves this section, if it is the outermost.
    """
    return _Held(undo)


def let_in() -> _LetIn:
    """Around code of the user's inside of `held`, which may take any time: signals aren't held."""
    return _LetIn()
