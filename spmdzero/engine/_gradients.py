"""Where gradients wait between the backward pass and the step."""

from collections.abc import Mapping

import torch

from spmdzero.plan import Placement, Role, ShardingPlan
from spmdzero.precision import GradientScaling, dtype_named
from spmdzero.xla import scope
from spmdzero.xla.mesh import DeviceMesh
from spmdzero.xla.reduction import GradientReduction


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
    """

    def __init__(
        self,
        *,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        reduction: GradientReduction,
        scaling: GradientScaling,
        wire: Mapping[str, torch.dtype],
    ) -> None:
        self._plan, self._mesh, self._reduction = plan, mesh, reduction
        self._scaling, self._wire = scaling, wire
        self._pending: dict[str, torch.Tensor] = {}
        self._deferred: dict[str, torch.Tensor] = {}
        self._summed = False
        self.deferring = False
        self.accumulators: dict[str, torch.Tensor] = {}
        self.replan(plan)

    def replan(self, plan: ShardingPlan) -> None:
        """Allocates the accumulators that `plan` has, and drops those that it has not."""
        self._plan = plan
        self.clear()
        self.accumulators = {}
        for tensor in plan:
            placement = tensor.placement(Role.ACCUMULATOR)
            if placement is not None:
                dtype = dtype_named(tensor.dtype(Role.ACCUMULATOR))
                zeros = self._mesh.stored_zeros(tensor.shape, placement, dtype)
                self.accumulators[tensor.name] = zeros

    def add_local(self, name: str, grad: torch.Tensor) -> None:
        """Adds one replica's gradient, `[*shape]` in replica space."""
        tensor = self._plan[name]
        if not tensor.trainable:
            return  # differentiable, but in no param group
        grad = grad.to(dtype_named(tensor.dtype(Role.GRADIENT)))
        if name in self._deferred:
            grad = self._deferred.pop(name) + grad
        if self.deferring:
            self._summed = True
            self._deferred[name] = grad
            return
        placement = self._waiting_placement(name)
        if placement.kind == "partial":
            self._accumulate(name, self._reduction.partial(grad), placement)
            return
        with scope(f"zero.gradient/{name}"):
            before, after = self._scaling.before, self._scaling.after
            reduced = self._reduction.reduce_local(
                _times(grad, before), placement, dtype=self._wire.get(name)
            )
            self._accumulate(name, _times(reduced, after), placement)

    def reduce_deferred(self) -> None:
        """Lets the gradients that were added while `deferring` join the others."""
        deferred, self._deferred = self._deferred, {}
        for name, grad in deferred.items():
            self.add_local(name, grad)

    def add_global(self, name: str, grad: torch.Tensor) -> None:
        """Adds a gradient of the whole batch, `[*shape]` in global space; the compiler reduces."""
        tensor = self._plan[name]
        if not tensor.trainable:
            return
        placement = self._waiting_placement(name)
        with scope(f"zero.gradient/{name}"):
            scaling = self._scaling
            grad = _times(grad.to(dtype_named(tensor.dtype(Role.GRADIENT))), scaling.whole)
            if placement.kind == "partial":
                # What `take` does to the sum of the shares is undone in each.
                grad = _times(grad, 1 / (scaling.before * scaling.after))
                share = (grad / self._mesh.size).expand(self._mesh.size, *grad.shape)
                self._accumulate(name, share, placement)
            else:
                self._accumulate(name, self._mesh.store(grad, placement), placement)

    def take(self, name: str) -> torch.Tensor:
        """The summed gradient as the step needs it, in its stored shape; zeros if there is none.

        A parameter that took no part in the loss has a zero gradient, as under DeepSpeed's ZeRO
        (runtime/zero/stage_1_and_2.py): weight decay and momentum still move it.
        """
        tensor = self._plan[name]
        final = tensor.placement(Role.GRADIENT)
        assert final is not None
        if name not in self.accumulators:
            if name in self._pending:
                return self._pending.pop(name)
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

    @property
    def waiting(self) -> bool:
        """Whether a gradient was added since the last `clear`."""
        return self._summed

    def clear(self) -> None:
        """Forgets what was summed: pending gradients, and accumulators by zeroing them."""
        if not self._summed:
            return  # zeroing zeros would be operations of the next micro-batch, and a recompile
        self._summed = False
        self._pending.clear()
        self._deferred.clear()
        for name, accumulator in self.accumulators.items():
            accumulator.zero_()
            self._mesh.mark(accumulator, self._spec(name, self._waiting_placement(name)))

    def _waiting_placement(self, name: str) -> Placement:
        tensor = self._plan[name]
        placement = tensor.placement(Role.ACCUMULATOR) or tensor.placement(Role.GRADIENT)
        assert placement is not None
        return placement

    def _spec(self, name: str, placement: Placement) -> tuple:
        return placement.partition_spec(self._plan[name].shape, self._mesh.spec)

    def _accumulate(self, name: str, grad: torch.Tensor, placement: Placement) -> None:
        self._summed = True
        if name in self.accumulators:
            self.accumulators[name].add_(grad)
            self._mesh.mark(self.accumulators[name], self._spec(name, placement))
        elif name in self._pending:
            self._pending[name] = self._mesh.mark(
                self._pending[name] + grad, self._spec(name, placement)
            )
        else:
            self._pending[name] = grad


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor
