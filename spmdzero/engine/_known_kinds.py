"""The part that replayed and folded steps share: the watched module and the known kinds."""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from spmdzero.backend.pure import ModuleWatch
from spmdzero.engine._kinds import Kind, Trust

# Number of kinds of micro-batch that are kept; they differ in inputs, modes, frozen parameters.
_MOST_KINDS = 64
logger = logging.getLogger("spmdzero")
TrustT = TypeVar("TrustT", bound=Trust)


class KnownKinds(Generic[TrustT]):
    """The record of each kind, for as long as the module stays as it was when it was traced.

    Args:
        look: makes a watch of the module as it is now.

    Attributes:
        kinds: the latest 64 kinds, each with its record.
    """

    def __init__(self, look: Callable[[], ModuleWatch]) -> None:
        self._look = look
        self._watch: ModuleWatch | None = None
        self._said: set[str] = set()
        self.kinds: dict[Kind, TrustT] = {}

    def recheck(self) -> None:
        """Makes the next micro-batch of each kind be traced once more, and compared."""
        for known in self.kinds.values():
            known.recheck()

    @property
    def watch(self) -> ModuleWatch:
        """The watch of the module, which exists after the first `changed`."""
        assert self._watch is not None
        return self._watch

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The module's parameters, as the watch saw them."""
        return self._watch.parameters if self._watch is not None else ()

    def changed(self) -> str | None:
        """How the module changed since the latest look; a change makes it forget all kinds."""
        change = self._watch.change() if self._watch is not None else None
        if change is not None:
            self.kinds.clear()
        if self._watch is None or change is not None:
            self._watch = self._look()
        return change

    def accept_changes(self) -> None:
        """Accepts the changes that a trace made to the module, as each step makes them."""
        if self._watch is not None and self._watch.change():
            self._watch = self._look()
            self.kinds = {key: k for key, k in self.kinds.items() if not k.ready}

    @property
    def any_ready(self) -> bool:
        """Whether a kind needs no more traces."""
        return any(known.ready for known in self.kinds.values())

    def add(self, kind: Kind, known: TrustT) -> TrustT:
        """Keeps a new kind, and drops the oldest if there are too many."""
        if len(self.kinds) == _MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]
        self.kinds[kind] = known
        return known

    def hook(self) -> str | None:
        """Why a hook of the module has to run in Python at each step, or None without one."""
        hook = self.watch.hook
        return None if hook is None else f"Python has to run at each step: {hook}"

    def say_python(self, level: int, runs: str, reason: str) -> None:
        """Logs that Python `runs`, as in ``"engine(...) runs the model's Python"``, and why."""
        message = f"{runs}, which takes longer than to start what was compiled: %s"
        self.say(level, message, reason)

    def say(self, level: int, message: str, reason: str) -> None:
        """Logs `message` with `reason`, once for each attribute and not for each of its values."""
        about = message + reason.split(":")[0]
        if about not in self._said:
            self._said.add(about)
            logger.log(level, message, reason)
