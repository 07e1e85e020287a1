"""Where gradients wait between the backward pass and the step."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from spmdzero.backend.torch_xla import scope, write_stamp
from spmdzero.backend.torch_xla.mesh import DeviceMesh, fresh
from spmdzero.backend.torch_xla.reduction import GradientReduction, let_go_of_whole
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import Placement, Role, ShardingPlan
from spmdzero.precision import GradientScaling, dtype_named
from spmdzero.step._autograd import set_autograd_grad


class GradientStore:
    """Sums the gradients of micro-batches under the plan's placement.

    With one micro-batch per step nothing is stored: the reduced gradient stays a value of the
    step's graph. With more, each parameter has an accumulator on the devices: a Partial at
    stages 0 and 1 (nothing moves before the boundary), a shard at stage 2.

    Attributes:
        accumulators: parameter name -> its accumulator.
        deferring: whether replicas' gradients are kept, unreduced, for the next that is not.

    Args:
        plan, mesh: where each gradient lives.
        reduction: how replicas' gradients become one.
        scaling: what they are multiplied by on the way.
        wire: parameter name -> the dtype in which its gradient crosses the wire, where that is
            not the reduction's.
        loss_scale: the factor that is in every gradient, 1.0 but for fp16.
    """

    def __init__(
        self,
        *,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        reduction: GradientReduction,
        scaling: GradientScaling,
        wire: Mapping[str, torch.dtype],
        loss_scale: Callable[[], float],
    ) -> None:
        self._plan, self._mesh, self._reduction = plan, mesh, reduction
        self._scaling, self._wire, self._loss_scale = scaling, wire, loss_scale
        self._pending: dict[str, torch.Tensor] = {}
        self._deferred: dict[str, torch.Tensor] = {}
        self._summed: set[str] = set()
        # What `read` returned, and its stamp: whoever holds one may write into it.
        self._handed: dict[str, tuple[torch.Tensor, Any]] = {}
        self.deferring = False
        self.accumulators: dict[str, torch.Tensor] = {}
        self.replan(plan)

    def replan(self, plan: ShardingPlan) -> None:
        """Allocates the accumulators that `plan` has, and drops those that it has not."""
        self._plan = plan
        self.clear()
        # The same dict: captured steps find an accumulator by it.
        self.accumulators.clear()
        for tensor in plan:
            placement = tensor.placement(Role.ACCUMULATOR)
            if placement is not None:
                dtype = dtype_named(tensor.dtype(Role.ACCUMULATOR))
                zeros = self._mesh.stored_zeros(tensor.shape, placement, dtype)
                self.accumulators[tensor.name] = zeros

    def add_local(self, name: str, grad: torch.Tensor) -> None:
        """Adds one replica's gradient, `[*shape]` in replica space."""
        if not self.is_trained(name):
            return
        grad = grad.to(dtype_named(self._plan[name].dtype(Role.GRADIENT)))
        if name in self._deferred:
            grad = self._deferred.pop(name) + grad
        if self.deferring:
            self._summed.add(name)
            self._deferred[name] = grad
            return
        self.add_reduced(name, self.reduced(name, grad))

    def reduced(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """One replica's gradient in the form in which it waits for the step; writes nothing."""
        grad = grad.to(dtype_named(self._plan[name].dtype(Role.GRADIENT)))
        placement = self._waiting_placement(name)
        if placement.kind == "partial":
            return self._reduction.partial(grad)
        with scope(f"zero.gradient/{name}"):
            before, after = self._scaling.before, self._scaling.after
            reduced = self._reduction.reduce_local(
                _times(grad, before), placement, dtype=self._wire.get(name)
            )
            return _times(reduced, after)

    def add_reduced(self, name: str, grad: torch.Tensor) -> None:
        """Adds a gradient in the form in which it waits for the step."""
        self._take_back(name)
        self._summed.add(name)
        if name in self.accumulators:
            self._mark(name, self.accumulators[name].add_(grad))
        elif name in self._pending:
            self._pending[name] = self._mark(name, self._pending[name] + grad)
        else:
            self._pending[name] = grad

    @property
    def keeps_local(self) -> bool:
        """Whether the next gradient meets, or becomes, one that is not reduced."""
        return self.deferring or bool(self._deferred)

    def is_trained(self, name: str) -> bool:
        """Whether a gradient of this parameter is used: it may be in no param group."""
        return self._plan[name].trainable

    def reduce_deferred(self) -> None:
        """Lets the gradients that were added while `deferring` join the others."""
        deferred, self._deferred = self._deferred, {}
        for name, grad in deferred.items():
            self.add_local(name, grad)

    def add_global(self, name: str, grad: torch.Tensor) -> None:
        """Adds a gradient of the whole batch, `[*shape]` in global space; the compiler reduces."""
        if not self.is_trained(name):
            return
        with scope(f"zero.gradient/{name}"):
            stored = self._stored(name, _times(grad, self._scaling.whole))
            self.add_reduced(name, let_go_of_whole(stored, self._waiting_placement(name)))

    def _stored(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        whole = whole.to(dtype_named(self._plan[name].dtype(Role.GRADIENT)))
        placement = self._waiting_placement(name)
        if placement.kind != "partial":
            return self._mesh.store(whole, placement)
        # What `take` does to the sum of the shares is undone in each.
        share = _times(whole, 1 / (self._scaling.before * self._scaling.after)) / self._mesh.size
        return share.expand(self._mesh.size, *whole.shape)

    def take(self, name: str) -> torch.Tensor:
        """The summed gradient as the step needs it, in its stored shape; zeros if there is none.

        A parameter that took no part in the loss has a zero gradient, as under DeepSpeed's ZeRO
        (runtime/zero/stage_1_and_2.py): weight decay and momentum still move it.
        """
        self._take_back(name)
        if name in self._pending:
            return self._pending.pop(name)
        return self._final(name)

    def _final(self, name: str) -> torch.Tensor:
        tensor = self._plan[name]
        final = tensor.placement(Role.GRADIENT)
        assert final is not None
        if name not in self.accumulators:
            if name in self._pending:
                return self._pending[name]
            dtype = dtype_named(tensor.dtype(Role.GRADIENT))
            return self._mesh.stored_zeros(tensor.shape, final, dtype)
        total = self.accumulators[name]
        waiting = self._waiting_placement(name)
        if waiting.kind == "partial":
            with scope(f"zero.gradient/{name}"):
                total = self._reduction.reduce_partial(
                    _times(total, self._scaling.before), final, dtype=self._wire.get(name)
                )
                total = _times(total, self._scaling.after)
        return total

    def read(self, name: str) -> torch.Tensor | None:
        """The gradient summed so far, `[*shape]`, whole, without the loss scale; None for none.

        Returns the same tensor until the gradient changes. What the caller writes into it is
        taken over before the gradient is used or added to.
        """
        if name in self._deferred:
            # Also inside `no_sync`: a gradient that only its replica has is nothing to read.
            deferring, self.deferring = self.deferring, False
            self.add_local(name, self._deferred.pop(name))
            self.deferring = deferring
        if name not in self._summed:
            return None
        if name not in self._handed:
            tensor = self._plan[name]
            placement = tensor.placement(Role.GRADIENT)
            assert placement is not None
            whole = self._mesh.gather(self._final(name), placement, tensor.shape)
            scale = self._loss_scale()
            if scale != 1:
                whole = whole.float() / scale
            whole = self._mesh.mark(fresh(whole))
            self._handed[name] = whole, write_stamp(whole)
        return self._handed[name][0]

    def write(self, name: str, whole: torch.Tensor) -> None:
        """Replaces what was summed by a gradient `[*shape]` without the loss scale."""
        self._handed.pop(name, None)
        self._deferred.pop(name, None)
        scale = self._loss_scale()
        stored = self._stored(name, whole if scale == 1 else whole.float() * scale)
        if name in self.accumulators:
            self._mark(name, self.accumulators[name].copy_(stored))
        else:
            self._pending[name] = stored
        self._summed.add(name)

    def _take_back(self, name: str) -> None:
        if name in self._handed:
            whole, stamp = self._handed.pop(name)
            if write_stamp(whole) != stamp:
                self.write(name, whole)

    def discard(self, name: str) -> None:
        """Forgets what was summed for one parameter."""
        if name not in self._summed:
            return  # zeroing zeros would be operations of the next micro-batch, and a recompile
        self._summed.discard(name)
        for kept in (self._handed, self._pending, self._deferred):
            kept.pop(name, None)
        if name in self.accumulators:
            self._zero(name)

    @property
    def unit(self) -> float:
        """What the sum of a Partial's summands is multiplied by to be the gradient."""
        return self._scaling.before * self._scaling.after

    def summed(self) -> tuple[str, ...]:
        """The parameters whose gradients wait, all of them in accumulators.

        Raises:
            SpmdZeroUsageError: some wait in the pending program or, unreduced, in a replica.
        """
        for name in list(self._handed):
            self._take_back(name)
        if self._pending or self._deferred:
            raise SpmdZeroUsageError(
                "a checkpoint between backward and step would lose the gradients of this "
                "micro-batch: call step() first"
            )
        return tuple(name for name in self.accumulators if name in self._summed)

    def adopt(self, names: Iterable[str]) -> None:
        """Takes what now is in the accumulators for the gradients of these parameters."""
        for kept in (self._summed, self._handed, self._pending, self._deferred):
            kept.clear()
        self._summed.update(names)

    @property
    def waiting(self) -> bool:
        """Whether a gradient was added since the last `clear`."""
        return bool(self._summed)

    @property
    def waiting_names(self) -> frozenset[str]:
        """The parameters to which a gradient was added since the last `clear`."""
        return frozenset(self._summed)

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """`clear`, and what autograd itself still holds of `parameters`."""
        for parameter in parameters:
            set_autograd_grad(parameter, None)
        self.clear()

    def clear(self) -> None:
        """Forgets what was summed: pending gradients, and accumulators by zeroing them."""
        if not self._summed:
            return
        for kept in (self._summed, self._handed, self._pending, self._deferred):
            kept.clear()
        for name in self.accumulators:
            self._zero(name)

    def _zero(self, name: str) -> None:
        self._mark(name, self.accumulators[name].zero_())

    def _mark(self, name: str, waiting: torch.Tensor) -> torch.Tensor:
        spec = self._waiting_placement(name).partition_spec(self._plan[name].shape, self._mesh.spec)
        return self._mesh.mark(waiting, spec)

    def _waiting_placement(self, name: str) -> Placement:
        tensor = self._plan[name]
        placement = tensor.placement(Role.ACCUMULATOR) or tensor.placement(Role.GRADIENT)
        assert placement is not None
        return placement


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor
