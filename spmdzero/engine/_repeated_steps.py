"""Starts the program of the three calls again, without recording the backward pass and update."""

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from spmdzero.backend import Beginning, Repeat, compiler
from spmdzero.engine._launching import Launching
from spmdzero.state._training import Training
from spmdzero.step._boundary import Ending
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


class RepeatedSteps:
    """Ends micro-batches whose forward is folded and whose backward waits in the `GradientStore`.

    The script's own operations on the loss are recorded at each step, and with the forward they are
    the step's beginning. A beginning that wasn't seen before is compiled with the rest of the step:
    the backward, and its `Ending`. Later ones start that program. If
    there can be none, backward and update are recorded.

    Args:
        training: the training of the engine.
        launching: takes note of the programs.

    Attributes:
        repeated: number of micro-batches so far whose program was started again.
    """

    def __init__(self, training: Training, launching: Launching) -> None:
        self._training, self._launching = training, launching
        # None for a beginning whose step is recorded.
        self._known: OrderedDict[Hashable, _Known | None] = OrderedDict()
        self.repeated = 0

    def start(self, *, boundary: bool, blocked: bool) -> bool:
        """Starts the program of the micro-batch, if it is known.

        Otherwise it has the held backward pass recorded, and returns False.

        Args:
            boundary: whether the micro-batch ends its step.
            blocked: whether something keeps steps from being folded now.
        """
        backward = self._training.gradients.held
        if backward is None:
            return False
        kind, store = "boundary" if boundary else "micro", self._training.gradients
        # Without accumulators the gradient of a micro-batch waits in the program that is recorded.
        known = not blocked and (boundary or store.accumulates)
        if known and self._launching.repeated(
            kind, lambda: self._started(compiler.beginning(backward.kept), backward, kind)
        ):
            return True
        store.settle()
        return False

    def _started(self, beginning: Beginning, backward: HeldBackward, kind: str) -> bool:
        boundary = kind == "boundary"
        alive, key = self._key(backward, beginning, boundary=boundary)
        seen = key in self._known
        if not seen:
            self._launching.programs.compiling.look(beginning.text)
            with self._launching.compiling(kind):
                self._remember(key, self._build(beginning, backward, alive, boundary=boundary))
        known = self._known[key]
        if known is None or not self._start(known, beginning, boundary=boundary):
            return False
        self.repeated += seen
        self._remember(key, known)
        return True

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
        return True

    def _build(
        self,
        beginning: Beginning,
        backward: HeldBackward,
        alive: tuple[Any, ...],
        *,
        boundary: bool,
    ) -> _Known | None:
        training, optimizer, state = self._training, self._training.optimizer, self._training.state
        assert optimizer is not None
        places = {p.name: p for p in state.places() if p.tensor is not None}
        named = {name: place.registry[place.key] for name, place in places.items()}
        numbers = training.mesh.place_all(optimizer.host_numbers()) if boundary else []
        with torch.inference_mode(mode=False), torch.no_grad():
            arriving = backward.function(compiler.tensors(backward.kept))
            path, gradients = training.gradients.path, dict[str, torch.Tensor]()
            for name, grad in zip(backward.names, arriving, strict=True):
                path.add(gradients, name, grad)
            ending = Ending(
                path=path,
                boundary=optimizer.boundary() if boundary else None,
                checks=training.health.check,
            )
            new = ending(named, gradients, numbers, finite=named["finite"])
            where = [places.get(name) or state.place(name) for name in new]
            values = [training.mesh.mark(new[p.name], p.spec) for p in where]
        order = {name: number for number, name in enumerate(places)}
        repeat = compiler.build(
            beginning,
            state=[*named.values()],
            new=values,
            into=[None if place.replaced else order[place.name] for place in where],
            numbers=numbers,
            constants=backward.function.constants,
        )
        if repeat is None:
            return None
        kept = [*places.values()]
        return _Known(
            repeat=repeat,
            reads=tuple([kept[i] for i in repeat.reads]),
            writes=tuple(where),
            written=sum(not place.replaced for place in where),
            slots=[*map(id, state.slots.values())],
            alive=alive,
        )

    def _remember(self, key: Hashable, known: _Known | None) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Forgets all programs."""
        self._known.clear()
