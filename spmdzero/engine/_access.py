"""One parameter's gradient, fp32 master and optimizer states as whole tensors, and back."""

import torch
from torch import nn

from spmdzero.backend.torch_xla import runtime
from spmdzero.backend.torch_xla.mesh import fresh
from spmdzero.engine._engine import Engine
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import Role


def read_gradient(engine: Engine, name: str) -> torch.Tensor | None:
    """The gradient of one parameter as `ZeroParameter.grad` describes it."""
    engine._collect_global_gradients()
    return engine._gradients.read(name)


def write_gradient(engine: Engine, name: str, value: torch.Tensor | None) -> None:
    """Replaces one parameter's gradient, or forgets it.

    Raises:
        SpmdZeroUsageError: `value` has another shape than the parameter.
    """
    engine._collect_global_gradients()
    if value is None:
        engine._gradients.discard(name)
    else:
        engine._gradients.write(name, _like(value, engine.plan[name].shape, f"{name}.grad"))


@torch.no_grad()
def read_master(engine: Engine, name: str) -> torch.Tensor:
    """The weights that the optimizer updates, `[*shape]` fp32 on the device, whole."""
    parameter, optimizer = _trained(engine, name)
    master = optimizer.state[parameter].get("master")
    if master is None:
        return fresh(parameter.detach()).float()
    return _whole(engine, name, master, Role.MASTER)


@torch.no_grad()
def write_master(engine: Engine, name: str, value: torch.Tensor) -> None:
    """Replaces one parameter: its fp32 master, and the parameter itself, cast to its dtype.

    Raises:
        SpmdZeroUsageError: `value` has another shape than the parameter.
    """
    parameter, optimizer = _trained(engine, name)
    value = _like(value, engine.plan[name].shape, name).float()
    master = optimizer.state[parameter].get("master")
    if master is not None:
        _store(engine, name, master, value, Role.MASTER)
    parameter.copy_(value)
    engine.mesh.mark(parameter)
    # Pending, the write would make the next step another program.
    runtime.sync()


@torch.no_grad()
def read_state(engine: Engine, name: str, slot: str) -> torch.Tensor:
    """One optimizer state of one parameter, `[*shape]` or a scalar, fp32 on the device, whole.

    Raises:
        SpmdZeroUsageError: the optimizer keeps no state `slot`.
    """
    stored = _state(engine, name, slot)
    whole = _whole(engine, name, stored, Role.MOMENT) if stored.dim() else fresh(stored)
    return whole.float()


@torch.no_grad()
def write_state(engine: Engine, name: str, slot: str, value: torch.Tensor) -> None:
    """Replaces one optimizer state of one parameter.

    Raises:
        SpmdZeroUsageError: the optimizer keeps no state `slot`, or `value` has another shape than
            the parameter (than a scalar, for a state that is one).
    """
    stored = _state(engine, name, slot)
    shape = engine.plan[name].shape if stored.dim() else ()
    value = _like(value, shape, f"{name}.{slot}").to(stored.dtype)
    if stored.dim():
        _store(engine, name, stored, value, Role.MOMENT)
    else:
        engine.mesh.mark(stored.copy_(value))
    runtime.sync()


def _trained(engine: Engine, name: str) -> tuple[nn.Parameter, ZeroOptimizer]:
    if engine.optimizer is None:
        raise SpmdZeroUsageError(
            f"{name} has no master weights and no optimizer states: the engine was made without "
            'an optimizer. Name one in the config ("optimizer": {"type": "AdamW", ...})'
        )
    return engine.module.get_parameter(name), engine.optimizer


def _state(engine: Engine, name: str, slot: str) -> torch.Tensor:
    parameter, optimizer = _trained(engine, name)
    states = optimizer.state[parameter]
    if slot == "master" or slot not in states:
        kept = ", ".join(sorted(key for key in states if key != "master")) or "none"
        raise SpmdZeroUsageError(
            f"the optimizer keeps no state {slot!r} of {name}; it keeps: {kept}"
        )
    return states[slot]


def _whole(engine: Engine, name: str, stored: torch.Tensor, role: Role) -> torch.Tensor:
    tensor = engine.plan[name]
    placement = tensor.placement(role)
    assert placement is not None
    return engine.mesh.gather(stored, placement, tensor.shape)


def _store(
    engine: Engine, name: str, stored: torch.Tensor, value: torch.Tensor, role: Role
) -> None:
    tensor = engine.plan[name]
    placement = tensor.placement(role)
    assert placement is not None
    # In place, or the next step's program could not reuse the buffer.
    stored.copy_(engine.mesh.store(value, placement))
    engine.mesh.mark(stored, placement.partition_spec(tensor.shape, engine.mesh.spec))


def _like(value: torch.Tensor, shape: tuple[int, ...], what: str) -> torch.Tensor:
    if tuple(value.shape) != tuple(shape):
        raise SpmdZeroUsageError(
            f"{what} has shape {list(shape)}, the new value {list(value.shape)}"
        )
    return value.detach().to(runtime.device())
