"""A parameter whose `grad` is the engine's: summed over micro-batches, averaged over devices."""

import copy
import dataclasses
import weakref
from typing import Any, cast

import torch
from torch import nn

from spmdzero.backend.torch_xla import runtime, write_stamp
from spmdzero.engine._access import read_gradient, write_gradient
from spmdzero.engine._engine import Engine
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.step._autograd import autograd_grad, set_autograd_grad


@dataclasses.dataclass(frozen=True)
class Membership:
    """Which engine trains a parameter, and the parameter's name there.

    Attributes:
        name: the name in the engine's plan.
        reference: to the engine, weak: a parameter must not keep an engine alive.
    """

    name: str
    reference: weakref.ref[Engine]

    @property
    def engine(self) -> Engine | None:
        """The engine, None when it is gone."""
        return self.reference()


class ZeroParameter(nn.Parameter):
    """A parameter that an engine trains.

    Gradients never reach `torch.Tensor.grad` here: they leave the replica region for sharded or
    Partial accumulators. `grad` gathers them when it is read, and only then.
    """

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient summed since the last step, `[*shape]` on the device, whole.

        Averaged over devices, divided by the gradient accumulation steps, and without the loss
        scale; in the dtype of gradient accumulation (fp32 under fp16). None before `backward`,
        after a step, and for a parameter that took no part. What is written into it in place,
        `torch.nn.utils.clip_grad_norm_` included, is what the step uses.
        """
        member = membership(self)
        engine = member.engine if member else None
        if member is None or engine is None:
            return autograd_grad(self)
        return read_gradient(engine, member.name)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        member = membership(self)
        engine = member.engine if member else None
        if member is None or engine is None:
            set_autograd_grad(self, value)
        else:
            write_gradient(engine, member.name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # A copy belongs to no engine.
        if id(self) not in memo:
            duplicate = nn.Parameter(self.detach().clone(), self.requires_grad)
            duplicate.__dict__.update(
                {k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != _MEMBERSHIP}
            )
            memo[id(self)] = duplicate
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, proto: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({k: v for k, v in vars(self).items() if k != _MEMBERSHIP})
        return plain.__reduce_ex__(proto)


_MEMBERSHIP = "_spmdzero_membership"


def adopt_parameters(engine: Engine) -> None:
    """Makes the gradients of `engine` readable as `grad` of its module's trained parameters."""
    reference = weakref.ref(engine)
    for name, parameter in engine.module.named_parameters():
        if engine.plan[name].trainable:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = ZeroParameter
            setattr(parameter, _MEMBERSHIP, Membership(name, reference))


def membership(parameter: torch.Tensor) -> Membership | None:
    """Who trains `parameter`; None for one that no engine does."""
    return getattr(parameter, _MEMBERSHIP, None)


class MastersFollow:
    """Hooks of each submodule: what `load_state_dict` wrote becomes the optimizer's masters.

    Otherwise the masters would undo it at the next step. The masters of what a partial state dict
    leaves alone keep their digits. A copy or a pickle of the module does nothing: it belongs to no
    engine.
    """

    def __init__(self, optimizer: ZeroOptimizer | None = None) -> None:
        self._optimizer = optimizer
        self._stamps: dict[torch.Tensor, object] = {}

    def watch(self, model: nn.Module) -> None:
        """Follows loads into `model` and into each of its submodules."""
        for module in model.modules():
            module.register_load_state_dict_pre_hook(self._before)
            module.register_load_state_dict_post_hook(self._after)

    def _before(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if self._optimizer is not None and metadata.get("assign_to_params_buffers"):
            raise SpmdZeroUsageError(
                "load_state_dict(assign=True) would replace parameters that the engine trains by "
                "others. Leave assign out: values are copied onto the devices"
            )
        for parameter in module.parameters(recurse=False):
            self._stamps[parameter] = write_stamp(parameter)

    def _after(self, module: nn.Module, _: Any) -> None:
        own = [p for p in module.parameters(recurse=False) if p in self._stamps]
        written = {p for p in own if self._stamps.pop(p) != write_stamp(p)}
        if written and self._optimizer is not None:
            self._optimizer.refresh_masters(written)
            runtime.sync()

    def __reduce__(self) -> Any:
        return MastersFollow, ()
