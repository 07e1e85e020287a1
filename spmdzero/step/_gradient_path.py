"""The path of a gradient from a micro-batch to the step, as pure functions of values."""

import dataclasses
import importlib
from collections.abc import Mapping

import torch
from torch import nn

from spmdzero.backend import Mesh, Reduction, gather, programs, store, stored_zeros
from spmdzero.config import TorchAutocastConfig
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.plan import Layout, Role, ShardingPlan
from spmdzero.precision import GradientScaling, PrecisionPolicy, dtype_named


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientPath:
    """The forms in which gradients wait for the step, and their conversion to the final form.

    A gradient waits as a partial if the plan says so (stages 0 and 1 with accumulation: nothing is
    communicated before the boundary), otherwise reduced to its final layout.

    Attributes:
        plan, mesh: where each gradient lives.
        reduction: reduces the gradients of replicas to one.
        scaling: the factors of gradients before and after the reduction.
        wire: parameter name -> dtype in which its gradient is communicated, if it isn't the
            reduction's.
    """

    plan: ShardingPlan
    mesh: Mesh
    reduction: Reduction
    scaling: GradientScaling
    wire: Mapping[str, torch.dtype]

    def is_trained(self, name: str) -> bool:
        """Whether the gradient of this parameter is used; a parameter may be in no param group."""
        return self.plan[name].trainable

    def in_dtype(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Casts `grad` to the plan's dtype of gradients."""
        return grad.to(dtype_named(self.plan[name].dtype(Role.GRADIENT)))

    def of_replica(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Converts one replica's gradient, `[*shape]` in replica space, to its waiting form."""
        grad, layout = self.in_dtype(name, local), self.waiting(name)
        if layout.kind == "partial":
            return self.reduction.partial(grad)
        with programs.scope(f"zero.gradient/{name}"):
            reduced = self.reduction.reduce_local(
                _times(grad, self.scaling.before), layout, dtype=self.wire.get(name)
            )
            return _times(reduced, self.scaling.after)

    def part(self, name: str, local: torch.Tensor, *, shown: str) -> torch.Tensor:
        """See `PartsOfGradients`."""
        grad, layout = self.in_dtype(name, local), self.waiting(name)
        with programs.scope(f"zero.gradient/{shown}"):
            part = self.reduction.part_of_sum(
                _times(grad, self.scaling.before), layout, dtype=self.wire.get(name)
            )
            return _times(part, self.scaling.after)

    def of_part(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """See `PartsOfGradients`."""
        layout = self.waiting(name)
        return self.mesh.leave(part, layout.spec, layout.stored)

    def partial(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Converts one replica's gradient to a row of a partial `[n, *shape]`; nothing moves."""
        return self.reduction.partial(self.in_dtype(name, local))

    def of_partial(self, name: str, partial: torch.Tensor) -> torch.Tensor:
        """Converts all replicas' summands, `[n, *shape]`, to the waiting form of their sum."""
        layout = self.waiting(name)
        return partial if layout.kind == "partial" else self._reduced(name, partial, layout)

    def _reduced(self, name: str, partial: torch.Tensor, layout: Layout) -> torch.Tensor:
        with programs.scope(f"zero.gradient/{name}"):
            total = self.reduction.reduce_partial(
                _times(partial, self.scaling.before), layout, dtype=self.wire.get(name)
            )
            return _times(total, self.scaling.after)

    def of_batch(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Converts the whole batch's gradient, `[*shape]` in global space, to its waiting form.

        The compiler reduces it.
        """
        with programs.scope(f"zero.gradient/{name}"):
            stored = self.stored(name, _times(whole, self.scaling.whole))
            return self.reduction.release_whole(stored, self.waiting(name))

    def stored(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Converts `whole`, `[*shape]`, so that the step uses exactly these values."""
        whole, layout = self.in_dtype(name, whole), self.waiting(name)
        if layout.kind != "partial":
            return store(self.mesh, whole, layout)
        # Each share is divided by the factor that `final` applies to the sum of the shares.
        share = _times(whole, 1 / self.unit) / self.mesh.replicas
        return share.expand(self.mesh.replicas, *whole.shape)

    def plus(self, name: str, waiting: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """The sum of two gradients in the waiting form."""
        return self.mesh.lay((waiting + more).to(waiting.dtype), self.waiting(name))

    def add(self, sums: dict[str, torch.Tensor], name: str, grad: torch.Tensor) -> None:
        """Adds a gradient in its waiting form to those in `sums`, by the parameter's name.

        A weight may have several, as one that is used in a loop and beside it.
        """
        sums[name] = self.plus(name, sums[name], grad) if name in sums else grad

    def accumulates(self, name: str) -> bool:
        """Whether the plan has an accumulator for this parameter."""
        return self.plan[name].placement(Role.ACCUMULATOR) is not None

    def zeros(self, name: str) -> torch.Tensor:
        """An accumulator of zeros."""
        dtype = dtype_named(self.plan[name].dtype(Role.ACCUMULATOR))
        return stored_zeros(self.mesh, self.plan.at_rest(f"accumulator/{name}"), dtype)

    def final(self, name: str, waiting: torch.Tensor | None) -> torch.Tensor:
        """The final gradient for the step, in its stored shape; zeros if no gradient waits.

        A parameter that took no part in the loss has a zero gradient, as under DeepSpeed's ZeRO
        (runtime/zero/stage_1_and_2.py): weight decay and momentum still move it.
        """
        final = self.plan.at_rest(f"gradient/{name}")
        if waiting is None:
            dtype = dtype_named(self.plan[name].dtype(Role.GRADIENT))
            return stored_zeros(self.mesh, final, dtype)
        if self.waiting(name).kind != "partial":
            return waiting
        return self._reduced(name, waiting, final)

    def whole(self, name: str, waiting: torch.Tensor | None) -> torch.Tensor:
        """The final gradient, gathered to `[*shape]` on every device."""
        layout = self.plan.at_rest(f"gradient/{name}")
        return gather(self.mesh, self.final(name, waiting), layout)

    @property
    def unit(self) -> float:
        """The factor that turns the sum of a partial's summands into the gradient."""
        return self.scaling.before * self.scaling.after

    def waiting(self, name: str) -> Layout:
        """The layout in which a gradient waits for the step."""
        role = Role.ACCUMULATOR if self.accumulates(name) else Role.GRADIENT
        return self.plan.at_rest(f"{role}/{name}")


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor


# DeepSpeed's list (runtime/torch_autocast.py).
_SAFE: tuple[type, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def autocast_wire(
    module: nn.Module, config: TorchAutocastConfig, precision: PrecisionPolicy
) -> dict[str, torch.dtype]:
    """Parameter name -> dtype, for parameters of the modules that are safe in lower precision.

    As in DeepSpeed a module is safe by its exact class: a subclass of nn.Linear is not safe.

    Raises:
        SpmdZeroConfigError: a path in `lower_precision_safe_modules` names no class.
    """
    if precision.autocast is None:
        return {}
    safe = _SAFE
    if config.lower_precision_safe_modules is not None:
        safe = tuple(_class_named(path) for path in config.lower_precision_safe_modules)
    return {
        f"{prefix}.{name}" if prefix else name: precision.autocast
        for prefix, part in module.named_modules()
        if type(part) in safe
        for name, _ in part.named_parameters(recurse=False)
    }


def _class_named(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        found = None
    if not isinstance(found, type):
        raise SpmdZeroConfigError(
            key="torch_autocast.lower_precision_safe_modules",
            value=path,
            reason="there is no class at this path",
            fix='Write full paths, such as "torch.nn.Linear".',
        )
    return found
