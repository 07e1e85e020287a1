"""Keeps gradients between the backward pass and the step."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from spmdzero.backend import FoldedFunction, Kept, arrays
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import ShardingPlan
from spmdzero.step._gradient_path import GradientPath
from spmdzero.step._state import State

Named = tuple[str, torch.nn.Parameter]


def autograd_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd summed into a parameter, even if its class overrides `grad`."""
    return torch.Tensor.grad.__get__(parameter)  # type: ignore[missing-attribute]


def parameters_with_grad(parameters: Iterable[Named]) -> list[Named]:
    """The named parameters into which autograd itself has summed a gradient."""
    # A subclass of torch's tensors would run Python for each parameter, at each step.
    get = torch.Tensor.grad.__get__  # type: ignore[missing-attribute]
    with torch._C.DisableTorchFunctionSubclass():
        return [named for named in parameters if get(named[1]) is not None]


def set_autograd_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Sets the gradient that `autograd_grad` returns."""
    torch.Tensor.grad.__set__(parameter, value)  # type: ignore[missing-attribute]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeldBackward:
    """A backward pass that is known and not recorded yet.

    Attributes:
        names: the parameters whose gradients it makes, in their order.
        function: computes them; the same object for all passes that compute the same.
        kept: the values that it takes.
        record: records it, and adds the gradients.
    """

    names: tuple[str, ...]
    function: FoldedFunction
    kept: Kept
    record: Callable[[], None]


class GradientStore:
    """Sums the gradients of micro-batches under the plan's placement.

    With one micro-batch per step nothing is stored: the reduced gradient stays a value of the
    step's graph. With more, each parameter has an accumulator on the devices: a partial at stages 0
    and 1 (nothing is communicated before the boundary), a shard from stage 2 on.

    Attributes:
        path: the forms in which gradients wait, and their arithmetic.
        deferring: whether replicas' gradients are kept unreduced until a later one is reduced.
        held: the latest backward pass, if it is not recorded; whoever asks for gradients has it
            recorded.

    Args:
        state: the state that holds the accumulators.
        loss_scale: returns the factor in every gradient, 1.0 except in fp16.
    """

    def __init__(
        self, path: GradientPath, state: State, *, loss_scale: Callable[[], float]
    ) -> None:
        self.path, self._state, self._loss_scale = path, state, loss_scale
        self._pending: dict[str, torch.Tensor] = {}
        self._deferred: dict[str, torch.Tensor] = {}
        self._summed: set[str] = set()
        # Tensors that `read` returned, with their stamps: callers may write into them.
        self._handed: dict[str, tuple[torch.Tensor, Any]] = {}
        self.deferring = False
        self.held: HeldBackward | None = None
        self.replan(path.plan)

    def replan(self, plan: ShardingPlan) -> None:
        """Makes the state follow `plan`: allocates its accumulators, and drops the earlier ones."""
        self.clear()
        self._state.plan = plan
        self.path = dataclasses.replace(self.path, plan=plan)
        self._accumulators.clear()
        for tensor in plan:
            if self.path.accumulates(tensor.name):
                self._accumulators[tensor.name] = self.path.zeros(tensor.name)

    @property
    def _accumulators(self) -> dict[str, torch.Tensor]:
        return self._state.accumulators

    @property
    def can_hold(self) -> bool:
        """Whether a backward pass may wait here unrecorded: nothing else waits for this step."""
        waits = self.held or self._pending or self._handed or self._deferred
        return not (waits or self.deferring)

    def settle(self) -> None:
        """Has a held backward pass recorded."""
        held, self.held = self.held, None
        if held is not None:
            # As in a backward pass: whoever reads a value may be in another mode.
            with torch.inference_mode(mode=False), torch.no_grad():
                held.record()

    def add_local(self, name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
        """See `GradientSink`."""
        self.settle()
        if not self.path.is_trained(name):
            return
        if waits:
            self.add_reduced(name, grad)
            return
        if not self.deferring and name not in self._deferred:
            self.add_reduced(name, self.path.of_replica(name, grad))
            return
        self._take_back(name)
        self._defer(name, self.path.partial(name, grad))
        if not self.deferring:
            self.add_reduced(name, self.path.of_partial(name, self._deferred.pop(name)))

    def _defer(self, name: str, partial: torch.Tensor) -> None:
        # It is kept in global space, where it outlives the program that made it.
        spec, known = self.path.mesh.batch_spec(partial.dim()), self._deferred.get(name)
        if known is None:
            self._deferred[name] = self.path.mesh.mark(partial, spec)
        else:
            self.path.mesh.commit(known, (known + partial).to(known.dtype), spec)
        self._summed.add(name)

    def add_reduced(self, name: str, grad: torch.Tensor) -> None:
        """Adds a gradient that is already in its waiting form."""
        self.settle()
        self._take_back(name)
        self._summed.add(name)
        waiting = self._waiting(name)
        self._keep(name, grad if waiting is None else self.path.plus(name, waiting, grad))

    def add_global(self, name: str, grad: torch.Tensor) -> None:
        """Adds a gradient of the whole batch, `[*shape]` in global space."""
        if self.path.is_trained(name):
            self.add_reduced(name, self.path.of_batch(name, grad))

    @property
    def accumulates(self) -> bool:
        """Whether there are accumulators, in which the gradients of micro-batches are summed."""
        return bool(self._accumulators)

    @property
    def outlive_programs(self) -> bool:
        """Whether gradients wait in tensors that outlive a program."""
        return bool(self._accumulators or self._deferred)

    @property
    def keeps_local(self) -> bool:
        """Whether the next gradient is deferred, or is added to a deferred one."""
        return self.deferring or bool(self._deferred)

    def reduce_deferred(self) -> None:
        """Reduces the deferred gradients, and adds them to the others."""
        self.settle()
        deferred, self._deferred = self._deferred, {}
        for name, partial in deferred.items():
            self.add_reduced(name, self.path.of_partial(name, partial))

    def take(self, name: str) -> torch.Tensor:
        """Takes the summed gradient in its final form, see `GradientPath.final`."""
        self.settle()
        self._take_back(name)
        waiting = self._waiting(name)
        self._pending.pop(name, None)
        return self.path.final(name, waiting)

    def read(self, name: str) -> torch.Tensor | None:
        """The gradient summed so far, `[*shape]`, whole, without the loss scale, or None.

        It is the same tensor until the gradient changes. Values that the caller writes into it are
        taken over before the gradient is used or added to.
        """
        self.settle()
        if name not in self._summed:
            return None
        if name not in self._handed:
            whole, scale = self.path.whole(name, self._sum_of(name)), self._loss_scale()
            if scale != 1:
                whole = whole.float() / scale
            whole = self.path.mesh.whole(arrays.fresh(whole))
            self._handed[name] = whole, arrays.write_stamp(whole)
        return self._handed[name][0]

    def write(self, name: str, whole: torch.Tensor) -> None:
        """Replaces the summed gradient by `whole`, `[*shape]` without the loss scale."""
        self.settle()
        self._handed.pop(name, None)
        self._deferred.pop(name, None)
        scale = self._loss_scale()
        self._keep(name, self.path.stored(name, whole if scale == 1 else whole.float() * scale))
        self._summed.add(name)

    def _sum_of(self, name: str) -> torch.Tensor | None:
        """The sum of the waiting and the deferred gradient; the latter stays deferred."""
        waiting, deferred = self._waiting(name), self._deferred.get(name)
        if deferred is None:
            return waiting
        reduced = self.path.of_partial(name, deferred)
        return reduced if waiting is None else self.path.plus(name, waiting, reduced)

    def _waiting(self, name: str) -> torch.Tensor | None:
        return self._accumulators.get(name, self._pending.get(name))

    def _keep(self, name: str, waiting: torch.Tensor) -> None:
        known = self._accumulators.get(name)
        if known is not None:
            self._state.write(f"accumulator/{name}", waiting, known=known)
        else:
            self._pending[name] = waiting

    def _take_back(self, name: str) -> None:
        if name in self._handed:
            whole, stamp = self._handed.pop(name)
            if arrays.write_stamp(whole) != stamp:
                self.write(name, whole)

    def discard(self, name: str) -> None:
        """Forgets the summed gradient of one parameter."""
        self.settle()
        if name not in self._summed:
            return  # zeroing zeros would add operations to the next micro-batch, and recompile it
        self._summed.discard(name)
        for kept in (self._handed, self._pending, self._deferred):
            kept.pop(name, None)
        if name in self._accumulators:
            self._keep(name, self.path.zeros(name))

    def summed(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients wait, if all wait in accumulators.

        Raises:
            SpmdZeroUsageError: a gradient waits in the pending program, or is deferred.
        """
        self.settle()
        for name in list(self._handed):
            self._take_back(name)
        if self._pending or self._deferred:
            raise SpmdZeroUsageError(
                "a checkpoint between backward and step would lose the gradients of this "
                "micro-batch: call step() first"
            )
        return tuple(name for name in self._accumulators if name in self._summed)

    def adopt(self, names: Iterable[str]) -> None:
        """Takes the accumulators' present values as the gradients of these parameters."""
        self._forget()
        self._summed.update(names)

    @property
    def waiting(self) -> bool:
        """Whether a gradient was added since the last `clear`."""
        return bool(self._summed or self.held)

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters to which a gradient was added since the last `clear`."""
        summed = frozenset(self._summed)
        return summed if self.held is None else summed.union(self.held.names)

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clears the summed gradients, and those that autograd itself holds for `parameters`."""
        for parameter in parameters:
            set_autograd_grad(parameter, None)
        self.clear()

    def clear(self) -> None:
        """Forgets all summed gradients: drops pending ones, and sets accumulators to zero."""
        self.held = None
        if self._summed:
            self._forget()
            for name in self._accumulators:
                self._keep(name, self.path.zeros(name))

    def _forget(self) -> None:
        self.held = None
        for kept in (self._summed, self._handed, self._pending, self._deferred):
            kept.clear()
