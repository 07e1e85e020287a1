"""One parameter's gradient, fp32 master and optimizer states as whole tensors, and back."""

import torch
from torch import nn

from spmdzero.backend.torch_xla import runtime
from spmdzero.backend.torch_xla.mesh import fresh
from spmdzero.engine._accumulation import Accumulation
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import Placement, Role
from spmdzero.state._training import Training
from spmdzero.step._optimizer import ZeroOptimizer


class ParameterAccess:
    """Reads and writes what an engine keeps of its parameters, by their names in the plan.

    Every `write_` raises SpmdZeroUsageError for a value of another shape, and what is about the
    optimizer does where there is none.
    """

    def __init__(self, training: Training, accumulation: Accumulation) -> None:
        self._training, self._accumulation = training, accumulation

    @property
    def optimizer(self) -> ZeroOptimizer | None:
        """What updates the parameters."""
        return self._training.optimizer

    def read_gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of one parameter as `ZeroParameter.grad` describes it."""
        self._accumulation.collect_gradients()
        return self._training.gradients.read(name)

    def write_gradient(self, name: str, value: torch.Tensor | None) -> None:
        """Replaces one parameter's gradient, or forgets it."""
        self._accumulation.collect_gradients()
        if value is None:
            self._training.gradients.discard(name)
        else:
            shape = self._training.plan[name].shape
            self._training.gradients.write(name, _like(value, shape, f"{name}.grad"))

    @torch.no_grad()
    def read_master(self, name: str) -> torch.Tensor:
        """The weights that the optimizer updates, `[*shape]` fp32 on the device, whole."""
        parameter, optimizer = self._trained(name)
        master = optimizer.state[parameter].get("master")
        if master is None:
            return fresh(parameter.detach()).float()
        return self._whole(name, master, Role.MASTER)

    @torch.no_grad()
    def write_master(self, name: str, value: torch.Tensor) -> None:
        """Replaces one parameter: its fp32 master, and the parameter itself, cast to its dtype."""
        parameter, optimizer = self._trained(name)
        value = _like(value, self._training.plan[name].shape, name).float()
        master = optimizer.state[parameter].get("master")
        if master is not None:
            self._store(name, master, value, Role.MASTER)
        parameter.copy_(value)
        self._training.mesh.mark(parameter)
        # Pending, the write would make the next step another program.
        runtime.sync()

    @torch.no_grad()
    def read_state(self, name: str, slot: str) -> torch.Tensor:
        """One optimizer state of one parameter, `[*shape]` or a scalar, fp32 on the device, whole.

        Raises:
            SpmdZeroUsageError: the optimizer keeps no state `slot`.
        """
        stored = self._state(name, slot)
        whole = self._whole(name, stored, Role.MOMENT) if stored.dim() else fresh(stored)
        return whole.float()

    @torch.no_grad()
    def write_state(self, name: str, slot: str, value: torch.Tensor) -> None:
        """Replaces one optimizer state of one parameter.

        Raises:
            SpmdZeroUsageError: the optimizer keeps no state `slot`.
        """
        stored = self._state(name, slot)
        shape = self._training.plan[name].shape if stored.dim() else ()
        value = _like(value, shape, f"{name}.{slot}").to(stored.dtype)
        if stored.dim():
            self._store(name, stored, value, Role.MOMENT)
        else:
            self._training.mesh.mark(stored.copy_(value))
        runtime.sync()

    def _trained(self, name: str) -> tuple[nn.Parameter, ZeroOptimizer]:
        if self.optimizer is None:
            raise SpmdZeroUsageError(
                f"{name} has no master weights and no optimizer states: the engine was made "
                'without an optimizer. Name one in the config ("optimizer": {"type": "AdamW", ...})'
            )
        return self._training.module.get_parameter(name), self.optimizer

    def _state(self, name: str, slot: str) -> torch.Tensor:
        parameter, optimizer = self._trained(name)
        states = optimizer.state[parameter]
        if slot == "master" or slot not in states:
            kept = ", ".join(sorted(key for key in states if key != "master")) or "none"
            raise SpmdZeroUsageError(
                f"the optimizer keeps no state {slot!r} of {name}; it keeps: {kept}"
            )
        return states[slot]

    def _placement(self, name: str, role: Role) -> Placement:
        placement = self._training.plan[name].placement(role)
        assert placement is not None
        return placement

    def _whole(self, name: str, stored: torch.Tensor, role: Role) -> torch.Tensor:
        shape = self._training.plan[name].shape
        return self._training.mesh.gather(stored, self._placement(name, role), shape)

    def _store(self, name: str, stored: torch.Tensor, value: torch.Tensor, role: Role) -> None:
        placement, mesh = self._placement(name, role), self._training.mesh
        # In place, or the next step's program could not reuse the buffer.
        stored.copy_(mesh.store(value, placement))
        mesh.mark(stored, placement.partition_spec(self._training.plan[name].shape, mesh.spec))


def _like(value: torch.Tensor, shape: tuple[int, ...], what: str) -> torch.Tensor:
    if tuple(value.shape) != tuple(shape):
        raise SpmdZeroUsageError(
            f"{what} has shape {list(shape)}, the new value {list(value.shape)}"
        )
    return value.detach().to(runtime.device())
