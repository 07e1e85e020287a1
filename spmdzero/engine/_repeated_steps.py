"""Starts the program of the three calls again, without recording the backward pass and update."""

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from spmdzero.backend import Beginning, FoldedFunction, Kept, Repeat, current, runtime
from spmdzero.engine._launching import Launching
from spmdzero.state._training import Training
from spmdzero.step._gradients import HeldBackward
from spmdzero.step._numbers import fixed_numbers
from spmdzero.step._state import Place, tensors_in

# Number of beginnings that are remembered at a time.
_MOST = 128


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Known:
    """A program that can be started again.

    Attributes:
        repeat: the program.
        reads, writes: where the tensors are that it reads and writes.
        written: number of tensors into which it writes.
        slots: ids of the dicts of states, which must stay as they are for the places to be right.
        alive: objects whose ids are in the key.
    """

    repeat: Repeat
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    written: int
    slots: list[int]
    alive: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Attempt:
    """A step from which the next like it is learned."""

    key: Hashable
    beginning: Beginning
    before: Kept
    places: tuple[Place, ...]
    backward: FoldedFunction
    alive: tuple[Any, ...]


class RepeatedSteps:
    """Ends micro-batches whose forward is folded and whose backward waits in the `GradientStore`.

    The script's own operations on the loss are recorded at each step, and with the forward they are
    the step's beginning. If the same beginning was seen before, the program of that step is started
    again. Otherwise backward and update are recorded.

    Args:
        training: the training of the engine.
        launching: takes note of the programs.

    Attributes:
        repeated: number of micro-batches so far whose program was started again.
    """

    def __init__(self, training: Training, launching: Launching) -> None:
        self._training, self._launching = training, launching
        # None for a beginning whose program is not known.
        self._known: OrderedDict[Hashable, _Known | None] = OrderedDict()
        self._attempt: _Attempt | None = None
        self.repeated = 0

    def start(self, *, boundary: bool, blocked: bool) -> bool:
        """Starts the program of the micro-batch, if it is known.

        Otherwise it has the held backward pass recorded, and returns False.

        Args:
            boundary: whether the micro-batch ends its step.
            blocked: whether something keeps steps from being folded now.
        """
        self._attempt = None
        backward, repeats = self._training.gradients.held, current().repeats
        if backward is None or repeats is None:
            return False
        if not blocked:
            beginning = repeats.beginning(backward.kept)
            alive, key = self._key(backward, beginning, boundary=boundary)
            seen, known = key in self._known, self._known.get(key)
            if known is not None and self._start(known, beginning, boundary=boundary):
                self._known.move_to_end(key)
                return True
            if seen:
                self._try(key, alive, beginning, backward)
            self._remember(key, self._known.get(key))
        self._training.gradients.settle()
        return False

    def _key(
        self, backward: HeldBackward, beginning: Beginning, *, boundary: bool
    ) -> tuple[tuple[Any, ...], Hashable]:
        """Returns what decides the rest of the micro-batch; and the objects whose ids are in it."""
        training, optimizer = self._training, self._training.optimizer
        assert optimizer is not None
        update = numbers = None
        if boundary:
            optimizer.renew()
            update = optimizer.boundary()
            numbers = fixed_numbers(optimizer._rules, optimizer.param_groups)
        alive = backward.function, update, training.plan
        summed = frozenset() if boundary else training.gradients.names
        return alive, (*map(id, alive), boundary, numbers, summed, beginning.key)

    def _start(self, known: _Known, beginning: Beginning, *, boundary: bool) -> bool:
        training, optimizer = self._training, self._training.optimizer
        assert optimizer is not None
        if [*map(id, training.state.slots.values())] != known.slots:
            # Their places would keep the former states alive.
            self.forget()
            return False
        present = [tensor for tensor in tensors_in(known.reads) if tensor is not None]
        into = [
            None if place.replaced else tensor
            for place, tensor in zip(known.writes, tensors_in(known.writes), strict=True)
        ]
        written = [tensor for tensor in into if tensor is not None]
        if len(present) < len(known.reads) or len(written) < known.written:
            return False
        numbers = training.mesh.place_all(optimizer.host_numbers()) if boundary else []
        made = known.repeat.start(beginning, state=present, numbers=numbers, into=into)
        if made is None:
            return False
        for place, value in zip(known.writes, made, strict=True):
            if place.replaced:
                place.registry[place.key] = value
        # The step writes, as autograd sees it.
        torch.autograd.graph.increment_version(written)
        training.gradients.adopt(() if boundary else training.gradients.names)
        self._launching.repeated("boundary" if boundary else "micro")
        self.repeated += 1
        return True

    def _try(
        self,
        key: Hashable,
        alive: tuple[Any, ...],
        beginning: Beginning,
        backward: HeldBackward,
    ) -> None:
        repeats, state = current().repeats, self._training.state
        assert repeats is not None
        places = [place for place in state.places() if place.tensor is not None]
        tensors = [tensor for place in places if (tensor := place.tensor) is not None]
        self._attempt = _Attempt(
            key=key,
            beginning=beginning,
            before=repeats.keep(tensors),
            places=tuple(places),
            backward=backward.function,
            alive=alive,
        )

    def sync(self) -> None:
        """Starts what is recorded, and learns to start it again if `start` wished so."""
        attempt, self._attempt = self._attempt, None
        repeats = current().repeats
        if attempt is None or repeats is None:
            runtime.sync()
            return
        state, optimizer = self._training.state, self._training.optimizer
        assert optimizer is not None
        before = {place.name for place in attempt.places}
        places = (*attempt.places, *(p for p in state.places() if p.name not in before))
        repeat = repeats.learn(
            attempt.beginning,
            before=attempt.before,
            after=[place.tensor for place in places],
            numbers=optimizer.numbers,
            constants=[*attempt.backward.constant_tensors, *optimizer.folds.constants()],
        )
        if repeat is None:
            return
        writes = tuple([places[i] for i in repeat.writes])
        known = _Known(
            repeat=repeat,
            reads=tuple([places[i] for i in repeat.reads]),
            writes=writes,
            written=sum(not place.replaced for place in writes),
            slots=[*map(id, state.slots.values())],
            alive=attempt.alive,
        )
        self._remember(attempt.key, known)

    def _remember(self, key: Hashable, known: _Known | None) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Forgets all programs."""
        self._known.clear()
