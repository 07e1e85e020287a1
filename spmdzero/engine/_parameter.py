"""A parameter whose `grad` is the engine's: summed over micro-batches, averaged over devices."""

import copy
import weakref
from typing import Any, cast

import torch
from torch import nn

from spmdzero.backend.torch_xla import runtime, write_stamp
from spmdzero.engine._access import ParameterAccess
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._training import Training
from spmdzero.step._autograd import autograd_grad, set_autograd_grad
from spmdzero.step._optimizer import ZeroOptimizer


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
        owner = owner_of(self)
        if owner is None:
            return autograd_grad(self)
        access, name = owner
        return access.read_gradient(name)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        owner = owner_of(self)
        if owner is None:
            set_autograd_grad(self, value)
        else:
            access, name = owner
            access.write_gradient(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # A copy belongs to no engine.
        if id(self) not in memo:
            duplicate = nn.Parameter(self.detach().clone(), self.requires_grad)
            duplicate.__dict__.update(
                {k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != _OWNER}
            )
            memo[id(self)] = duplicate
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, proto: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({k: v for k, v in vars(self).items() if k != _OWNER})
        return plain.__reduce_ex__(proto)


_OWNER = "_spmdzero_owner"


def adopt_parameters(training: Training, access: ParameterAccess) -> None:
    """Makes the gradients of trained parameters readable as their `grad`."""
    # A parameter must not keep an engine alive.
    reference = weakref.ref(access)
    for name, parameter in training.parameters:
        if training.plan[name].trainable:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = ZeroParameter
            setattr(parameter, _OWNER, (reference, name))


def owner_of(parameter: torch.Tensor) -> tuple[ParameterAccess, str] | None:
    """What the engine that trains `parameter` knows of it, and its name there; None for none."""
    reference, name = getattr(parameter, _OWNER, (lambda: None, ""))
    access = reference()
    return (access, name) if access is not None else None


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
