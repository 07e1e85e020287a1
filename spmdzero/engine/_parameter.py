"""A parameter that an engine trains, with its gradient and states as whole tensors."""

import copy
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn

from spmdzero.backend import (
    arrays,
    gather,
    runtime,
    same_on_hosts,
    store,
    undistributed,
)
from spmdzero.engine import _ds_attributes
from spmdzero.engine._accumulation import Accumulation
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import decoded, is_signed, recoded
from spmdzero.plan import Layout, coded_slot, scale_slot
from spmdzero.state._live_state import Held
from spmdzero.state._placed_module import take_off_devices
from spmdzero.state._training import Training
from spmdzero.step._gradients import autograd_grad, set_autograd_grad
from spmdzero.step._optimizer import ZeroOptimizer


@dataclasses.dataclass(frozen=True)
class TrainedParameter:
    """The gradient, master and optimizer states that an engine keeps for one parameter.

    Every `write_` raises SpmdZeroUsageError for a value of a different shape, and the methods for
    masters and states raise it without an optimizer.

    Attributes:
        name: the parameter's name in the plan.
        training, accumulation: those parts of the engine.
    """

    name: str
    training: Training
    accumulation: Accumulation

    def read_gradient(self) -> torch.Tensor | None:
        """The gradient as `ZeroParameter.grad` describes it."""
        self.accumulation.collect_gradients()
        return self.training.gradients.read(self.name)

    def write_gradient(self, value: torch.Tensor | None) -> None:
        """Replaces the gradient, or discards it if `value` is None."""
        self.accumulation.collect_gradients()
        if value is None:
            self.training.gradients.discard(self.name)
        else:
            self.training.gradients.write(self.name, self._like(value, self._shape, ".grad"))

    @torch.no_grad()
    def read_master(self) -> torch.Tensor:
        """The weights that the optimizer updates, `[*shape]` fp32 on the device, whole."""
        role, stored = self._master()
        return self._whole(stored, role).float()

    @torch.no_grad()
    def write_master(self, value: torch.Tensor) -> None:
        """Replaces the fp32 master, and the parameter itself, cast to its dtype."""
        parameter = self._trained()[0]
        value = self._like(value, self._shape).float()
        master = self.training.state.slots[parameter].get("master")
        if master is not None:
            self._store(master, value, "master")
        self._store(parameter, value, "parameter")
        # With a pending write the next step would need a different program.
        runtime.sync()

    @torch.no_grad()
    def read_state(self, slot: str) -> torch.Tensor:
        """One optimizer state, `[*shape]` or a scalar, fp32 on the device, whole.

        Raises:
            SpmdZeroUsageError: the optimizer keeps no state `slot`.
        """
        stored = self._state(slot)
        whole = self._whole(stored, slot) if stored.dim() else arrays.fresh(stored)
        if not self._is_coded(slot):
            return whole.float()
        scale = scale_slot(slot)
        return decoded(whole, self._whole(self._state(scale), scale), signed=is_signed(slot))

    @torch.no_grad()
    def write_state(self, slot: str, value: torch.Tensor) -> None:
        """Replaces one optimizer state.

        Raises:
            SpmdZeroUsageError: the optimizer keeps no state `slot`.
        """
        stored = self._state(slot)
        value = self._like(value, self._layout(slot).shape, f".{slot}")
        if self._is_coded(slot):
            scale, layout = scale_slot(slot), self._layout(slot)
            scales, laid = self._state(scale), store(self.training.mesh, value.float(), layout)
            codes, size = recoded(laid, scales=scales.shape, signed=is_signed(slot))
            self.training.mesh.lay(stored.copy_(codes), layout)
            self.training.mesh.lay(scales.copy_(size), self._layout(scale))
        elif stored.dim():
            self._store(stored, value.to(stored.dtype), slot)
        else:
            self.training.mesh.whole(stored.copy_(value.to(stored.dtype)))
        runtime.sync()

    @torch.no_grad()
    def read_dtensor(self, role: str) -> torch.Tensor | None:
        """A tensor of the parameter as a DTensor over the hosts, each of which calls this.

        Args:
            role: ``"master"`` or an optimizer state, fp32 then, or ``"gradient"``, in the dtype of
                `read_gradient`, and None without one.

        Raises:
            SpmdZeroUsageError: the optimizer keeps no such state.
        """
        if role == "gradient":
            whole = self.read_gradient()
            if whole is None:
                return None
            stored = store(self.training.mesh, whole, self._layout(role))
        else:
            self._trained()[1].renew()
            role, stored = self._master() if role == "master" else (role, self._state(role))
            if self._is_coded(role):
                scales = self._state(scale_slot(role))
                stored = decoded(stored, scales, signed=is_signed(role))
        # Importing DTensors would take time at each start.
        from spmdzero.state._dtensors import live_dtensors

        held = {role: Held.of(stored, self._layout(role))}
        dtype = None if role == "gradient" else torch.float32
        return live_dtensors(self.training, held, dtype=dtype)[role]

    def _trained(self) -> tuple[nn.Parameter, ZeroOptimizer]:
        optimizer = self.training.optimizer
        if optimizer is None:
            raise SpmdZeroUsageError(
                f"{self.name} has no master weights and no optimizer states: the engine was made "
                'without an optimizer. Name one in the config ("optimizer": {"type": "AdamW", ...})'
            )
        return self.training.module.get_parameter(self.name), optimizer

    def _master(self) -> tuple[str, torch.Tensor]:
        """The weights that the optimizer updates, and their role: an fp32 parameter has no copy."""
        parameter = self._trained()[0]
        master = self.training.state.slots[parameter].get("master")
        return ("parameter", parameter.detach()) if master is None else ("master", master)

    def _state(self, slot: str) -> torch.Tensor:
        states = self.training.state.slots[self._trained()[0]]
        if slot == "master" or slot not in states:
            kept = ", ".join(sorted(self._kept(states))) or "none"
            raise SpmdZeroUsageError(
                f"the optimizer keeps no state {slot!r} of {self.name}; it keeps: {kept}"
            )
        return states[slot]

    def _kept(self, states: Mapping[str, torch.Tensor]) -> Iterator[str]:
        for slot in states:
            if slot != "master" and not self._is_coded(coded_slot(slot) or ""):
                yield slot

    def _is_coded(self, slot: str) -> bool:
        return f"{slot}/{self.name}" in self.training.plan.in_eight_bits

    def _layout(self, role: str) -> Layout:
        return self.training.plan.at_rest(f"{role}/{self.name}")

    def _whole(self, stored: torch.Tensor, role: str) -> torch.Tensor:
        return gather(self.training.mesh, stored, self._layout(role))

    def _store(self, stored: torch.Tensor, value: torch.Tensor, role: str) -> None:
        layout, mesh = self._layout(role), self.training.mesh
        # The write is in place, as otherwise the next step's program could not reuse the buffer.
        stored.copy_(store(mesh, value, layout))
        mesh.lay(stored, layout)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.training.plan[self.name].shape

    def _like(self, value: torch.Tensor, shape: tuple[int, ...], what: str = "") -> torch.Tensor:
        if tuple(value.shape) != tuple(shape):
            raise SpmdZeroUsageError(
                f"{self.name}{what} has shape {list(shape)}, the new value {list(value.shape)}"
            )
        with same_on_hosts():
            return undistributed(value.detach()).to(runtime.device())


class ZeroParameter(nn.Parameter):
    """A parameter that an engine trains, or keeps frozen at stage 3.

    Gradients never reach `torch.Tensor.grad` here: they leave the replica region for sharded or
    partial accumulators. `grad` gathers them only when it is read.
    """

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient summed since the last step, `[*shape]` on the device, whole.

        It is averaged over devices, divided by the gradient accumulation steps, without the loss
        scale, and in the dtype of gradient accumulation (fp32 under fp16). It is None before
        `backward`, after a step, and for a parameter that took no part. The step uses values that
        are written into it in place, for example by `torch.nn.utils.clip_grad_norm_`.
        """
        trained = trained_parameter(self)
        return autograd_grad(self) if trained is None else trained.read_gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        trained = trained_parameter(self)
        if trained is None:
            set_autograd_grad(self, value)
        else:
            trained.write_gradient(value)

    @property
    def ds_tensor(self) -> NoReturn:
        """Always raises AttributeError: DeepSpeed's is the part of one rank."""
        raise AttributeError(
            "a parameter has no ds_tensor: this process drives several devices, each of which has "
            "a part. spmdzero.local_shards(parameter) is what each holds"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # A copy belongs to no engine.
        if id(self) not in memo:
            duplicate = nn.Parameter(self.detach().clone(), self.requires_grad)
            own = arrays.attributes(self)
            duplicate.__dict__.update(
                {k: copy.deepcopy(v, memo) for k, v in own.items() if k not in _LINKS}
            )
            memo[id(self)] = duplicate
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, proto: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({k: v for k, v in arrays.attributes(self).items() if k not in _LINKS})
        return plain.__reduce_ex__(proto)


_OWNER = "_spmdzero_owner"
_LINKS = (_OWNER, *_ds_attributes.NAMES)


@functools.cache
def _zero_class(own: type) -> type:
    if own is nn.Parameter:
        return ZeroParameter
    # A backend's tensors may have a class of their own, which stays a base class. nn.Parameter
    # disables __torch_function__ and comes first in the order of bases, so the backend's is set.
    answers = classmethod(own.__torch_function__.__func__)
    return type("ZeroParameter", (ZeroParameter, own), {"__torch_function__": answers})


def adopt_parameters(training: Training, accumulation: Accumulation) -> None:
    """Makes the gradients of trained parameters readable as their `grad`, and sets `ds_*`."""
    # A parameter must not keep an engine alive.
    owner = weakref.ref(training), weakref.ref(accumulation)
    plan = training.plan
    for name, parameter in training.state.parameters.items():
        trainable, parts = plan[name].trainable, plan.stage == 3
        if (trainable or parts) and type(parameter) is arrays.PARAMETER:
            parameter.__class__ = _zero_class(type(parameter))
        if trainable:
            setattr(parameter, _OWNER, (name, *owner))
        if parts:
            _ds_attributes.mark_partitioned(parameter, plan.at_rest(f"parameter/{name}").local)


def release(module: nn.Module) -> None:
    """Moves a module that an engine trains to the CPU, in place, as a plain torch module.

    Its engine can't go on. A module on the CPU stays as it is.
    """
    take_off_devices(module, without=_LINKS)


def trained_parameter(parameter: torch.Tensor) -> TrainedParameter | None:
    """The engine's record of `parameter`, or None if no engine trains it."""
    name, *owner = getattr(parameter, _OWNER, ("", lambda: None, lambda: None))
    training, accumulation = (reference() for reference in owner)
    if training is None or accumulation is None:
        return None
    return TrainedParameter(name, training, accumulation)
