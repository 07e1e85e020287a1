"""Holding back Ctrl-C, and Python's other signals, while a step must not be interrupted.

A handler that raises, as that of Ctrl-C does, may do so between any two lines. Between the line
that donates buffers of the state and the line that stores the new ones, the state would be lost.
Between that line and the one that counts the step, the state would be a step ahead of its count.
"""

import _signal  # type: ignore[missing-import]
import inspect
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# Signals for which scripts and torch's loaders have handlers. Profilers' signals are left out:
# their handlers look at the line that they interrupt.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGBREAK")
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
# The C functions under `signal`'s: its enums of handlers and signals take 10 times as long.
_get, _set = _signal.getsignal, _signal.signal
# Number of presses of Ctrl-C after which the user doesn't want to wait for the step's end.
_INSISTING = 3


class _Handler:
    """Takes the place of a signal's handler while signals are held.

    Args:
        own: the original handler, which is called at once where signals aren't held.
    """

    def __init__(self, own: Callable[[int, FrameType | None], Any]) -> None:
        self.own = own

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not _section.depth or _section.insists(number):
            _section.call(self, number, frame)


class _Section:
    """The section of the main thread, the only thread in which Python runs handlers.

    Attributes:
        depth: number of `held` around the running line, within the innermost `let_in`.
        inside: number of `let_in` around it.
        installed: whether handlers of this module are installed.
        raised: whether a handler has raised in the outermost section.
    """

    def __init__(self) -> None:
        self.depth, self.inside, self.installed, self.raised = 0, 0, False, False
        self._noted: dict[int, int] = {}
        self._handlers: dict[int, _Handler] = {}

    def insists(self, number: int) -> bool:
        """Records a signal; True if it is a Ctrl-C that came too often to wait any longer."""
        self._noted[number] = count = self._noted.get(number, 0) + 1
        insists = number == signal.SIGINT and count == _INSISTING
        if insists:
            del self._noted[number]
        return insists

    def install(self) -> None:
        """Installs a `_Handler` for each signal, and begins the outermost section."""
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
            # A handler that isn't replaced yet has raised.
            self._uninstall()
            raise

    def _uninstall(self) -> None:
        self.installed = False
        for number in self._handlers:
            # Some code may have set another handler inside.
            if isinstance(found := _get(number), _Handler):
                _set(number, found.own)

    def call(self, handler: _Handler, number: int, frame: FrameType | None) -> None:
        """Calls the original handler, which `handler` replaces."""
        try:
            handler.own(number, frame)
        except BaseException:
            self.raised = True
            raise

    def deliver(self) -> None:
        """Calls the handlers of the recorded signals."""
        while self._noted:
            number, _ = self._noted.popitem()
            try:
                self.call(self._handlers[number], number, inspect.currentframe())
            finally:
                self.deliver()

    def leave(self, *, outermost: bool) -> None:
        """Ends a section that no other section surrounds."""
        try:
            self.deliver()
            self.depth = 0
            if outermost:
                self._uninstall()
            # Deliver the signals that came in between.
            self.deliver()
        finally:
            self.depth = 0
            if outermost:
                self._uninstall()

    def forget(self) -> None:
        """Resets the section in a forked process: nothing is held there."""
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
        # Set the depth, don't count down: a `let_in` may have been left before its end began.
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
    """Context that holds signals back: their handlers run where the outermost context ends.

    If a handler raises, it raises there; the third Ctrl-C of one section raises at once. In other
    threads than the main one, which handlers never interrupt, this does nothing.

    Args:
        undo: called where a handler's exception leaves this section, if it is the outermost.
    """
    return _Held(undo)


def let_in() -> _LetIn:
    """Context for the user's code inside `held`, which may take any time: signals arrive there."""
    return _LetIn()
