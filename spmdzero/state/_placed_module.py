"""Moves the user's module to the devices and off them, in place.

Tensors that were computed of a parameter before are refused. Autograd holds on to that parameter:
it could not be exchanged, and they would keep the old value.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from spmdzero._user_line import user_line
from spmdzero.backend import (
    Mesh,
    arrays,
    is_dtensor,
    old_norm_error,
    old_norms,
    refuse_gradient_hooks,
    resting,
    runtime,
)
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import ShardingPlan
from spmdzero.state._homes import HeldError, exchange, left_home
from spmdzero.state._weights import WeightSource, aliases

_LINE = "initialize"


def refuse_old_weight_norm(module: nn.Module) -> None:
    """Refuses `torch.nn.utils.weight_norm`, which computes a weight before each forward.

    Raises:
        SpmdZeroUsageError: a submodule has it.
    """
    for prefix, part in module.named_modules():
        for name, norm in old_norms(part).items():
            # spectral_norm has nothing of autograd in its attribute before the first forward.
            if norm == "weight_norm":
                path = f"{prefix}.{name}" if prefix else name
                raise SpmdZeroUsageError(
                    f"{user_line(otherwise=_LINE)}: {old_norm_error(path, norm)}"
                )


def refuse_held(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Refuses a parameter that a graph of autograd holds, and says what was computed of it.

    Raises:
        SpmdZeroUsageError: always.
    """
    found = next(_computed_of(module, parameter), None)
    if found is None:
        what = (
            "something that was computed of it with gradients before initialize is still there, "
            "such as a penalty (sum(p.square().sum() for p in model.parameters())). Compute it "
            "after initialize, in the loss, or let go of it first (del penalty)"
        )
    else:
        what = (
            f"the attribute {found} was computed of it before initialize, and would keep its old "
            "value while it trains. Compute it in the forward"
        )
    raise SpmdZeroUsageError(
        f"{user_line(otherwise=_LINE)}: {name} can't move to the devices: {what}"
    )


def _computed_of(module: nn.Module, parameter: torch.Tensor) -> Iterator[str]:
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and _reaches(value.grad_fn, parameter):
                yield repr(f"{prefix}.{name}" if prefix else name)


def _reaches(node: Any, parameter: torch.Tensor) -> bool:
    left, seen = [node], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is parameter:
            return True
        left += [following for following, _ in node.next_functions]
    return False


Moved = dict[torch.Tensor, torch.Tensor]


def move_module(
    module: nn.Module,
    *,
    mesh: Mesh,
    dtype: torch.dtype,
    source: WeightSource,
    plan: ShardingPlan,
) -> Moved:
    """Puts parameters, cast to `dtype`, and buffers, with their dtypes, where the plan has them.

    A tensor of several names is the plan's by the first. Tensors are moved one by one, so only one
    tensor from `source` is on the host at a time. Every Python object that was a parameter stays
    that parameter: an optimizer or a closure made before keeps working, and tied weights stay tied.
    A parameter with a weak reference to it (nn.LSTM makes one) can't be exchanged in place and
    becomes a new object.

    Returns the parameters that became new objects: old -> new.

    Raises:
        SpmdZeroUsageError: a parameter or buffer is on a device other than the CPU, meta or the
            backend's; `source` gives a tensor a different shape; or something that was computed of
            a parameter, with gradients, is still there.
    """
    refuse_old_weight_norm(module)
    named = aliases(module)
    for tensor, names in named.items():
        _check(names[0], tensor)
    renewed: Moved = {}
    for tensor, names in named.items():
        is_parameter = isinstance(tensor, nn.Parameter)
        rest = plan.at_rest(f"{'parameter' if is_parameter else 'buffer'}/{names[0]}")
        home = left_home(tensor)
        if home is not None and home.is_at(rest) and tensor.dtype == dtype:
            continue
        cast = _value(tensor, names, source)
        if is_parameter and tensor.is_floating_point():
            cast = cast.to(dtype)
        if mesh.across is not None and arrays.is_mine(cast) and mesh.across.is_own(cast):
            cast = arrays.read(cast)
        on_host = cast.device.type == "cpu"
        placed = mesh.place_part(cast, rest.spec) if on_host else mesh.lay(arrays.fresh(cast), rest)
        placed = resting(mesh, placed, rest)
        if is_parameter:
            placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
        # Users group parameters by attributes such as `no_decay`, which are kept.
        placed.__dict__.update(arrays.attributes(tensor))
        try:
            exchanged = exchange(tensor, placed)
        except HeldError:
            refuse_held(module, names[0], tensor)
        else:
            if not exchanged:
                renewed[tensor] = placed
    _replace(module, renewed)
    return renewed


def take_off_devices(module: nn.Module, *, without: Collection[str]) -> None:
    """Moves parameters and buffers to the CPU, for plain torch, without their engine.

    Parameters stay the same objects, with the exception that `move_module` names.

    Args:
        module: the module of an engine.
        without: the attributes that link a parameter to its engine, which are dropped.
    """
    renewed: Moved = {}
    for tensor in [tensor for tensor in aliases(module) if arrays.is_mine(tensor)]:
        plain = tensor.detach().cpu()
        if isinstance(tensor, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
        own = arrays.attributes(tensor)
        plain.__dict__.update({k: v for k, v in own.items() if k not in without})
        if not exchange(tensor, plain):
            renewed[tensor] = plain
    _replace(module, renewed)


def _value(tensor: torch.Tensor, names: list[str], source: WeightSource) -> torch.Tensor:
    given = source(names)
    if given is None:
        return tensor.detach()
    if given.shape != tensor.shape:
        raise SpmdZeroUsageError(
            f"weights: {names[0]} is {list(given.shape)}, in the model it is {list(tensor.shape)}. "
            "Build the model with the sizes that the weights were saved with"
        )
    return given.to(tensor.dtype)


def _replace(module: nn.Module, renewed: Moved) -> None:
    for part in module.modules() if renewed else ():
        for registry in (part._parameters, part._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None and tensor in renewed:
                    # setattr is needed because nn.LSTM refreshes its list of weights there.
                    setattr(part, name, renewed[tensor])


def _check(name: str, tensor: torch.Tensor) -> None:
    if is_dtensor(tensor):
        raise SpmdZeroUsageError(
            f"{name} is a DTensor, as fully_shard, parallelize_module and distribute_tensor make "
            "them. A rank of its mesh is a process, and here one process drives all devices of a "
            "host. Hand the plain module to spmdzero.initialize: "
            '"zero_optimization": {"stage": 3} shards it as fully_shard does, '
            '"tensor_parallel": {"autotp_size": ...} as parallelize_module. Load DTensors '
            "afterwards, by engine.load_module_state_dict or engine.distributed_state()"
        )
    refuse_gradient_hooks(name, tensor)
    if tensor.device.type not in ("cpu", "meta", runtime.device().type):
        raise SpmdZeroUsageError(
            f"{name} is on {tensor.device}, spmdzero moves a model to the mesh itself. Build it "
            "on the CPU, or on the meta device, and hand it to spmdzero.initialize without "
            ".cuda() or .to()"
        )
