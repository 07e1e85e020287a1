"""Moving the user's module to the devices, in place."""

import torch
from torch import nn

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.xla import refuse_gradient_hooks, runtime
from spmdzero.xla.mesh import DeviceMesh

Moved = dict[torch.Tensor, torch.Tensor]


def move_module(module: nn.Module, *, mesh: DeviceMesh, dtype: torch.dtype) -> Moved:
    """Replicates parameters (cast to `dtype`) and buffers (as they are) on all devices.

    Every Python object that was a parameter stays that parameter: an optimizer or a closure made
    before keeps working, and tied weights stay tied. A parameter that something keeps a weak
    reference to (nn.LSTM does) can't be exchanged in place and becomes a new object.

    Returns the parameters that became new objects: old -> new.

    Raises:
        SpmdZeroUsageError: a parameter or buffer is on a device other than the CPU or ours, or
            parameters have another dtype than fp32 while `dtype` is fp32 (as DeepSpeed).
    """
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in named.items():
        _check(name, tensor, dtype)
    renewed: Moved = {}
    for tensor in named.values():
        is_parameter = isinstance(tensor, nn.Parameter)
        cast = tensor.detach()
        if is_parameter and tensor.is_floating_point():
            cast = cast.to(dtype)
        placed = mesh.place(cast) if cast.device.type == "cpu" else mesh.mark(cast.clone())
        if is_parameter:
            placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
        # Attributes such as `no_decay`, by which people group parameters.
        placed.__dict__.update(tensor.__dict__)
        try:
            torch.utils.swap_tensors(tensor, placed)
        except RuntimeError as error:
            if "weakref" not in str(error):
                raise
            renewed[tensor] = placed
    _replace(module, renewed)
    return renewed


def _replace(module: nn.Module, renewed: Moved) -> None:
    for part in module.modules() if renewed else ():
        for registry in (part._parameters, part._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None and tensor in renewed:
                    # setattr, because nn.LSTM refreshes its list of weights in it.
                    setattr(part, name, renewed[tensor])


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    refuse_gradient_hooks(name, tensor)
    if tensor.device.type not in ("cpu", runtime.device().type):
        raise SpmdZeroUsageError(
            f"{name} is on {tensor.device}, spmdzero moves a model from the CPU to the mesh "
            "itself. Build it on the CPU (for a meta model: load its weights first) and hand it "
            "to spmdzero.initialize without .cuda() or .to()"
        )
    if (
        isinstance(tensor, nn.Parameter)
        and tensor.is_floating_point()
        and dtype == torch.float32
        and tensor.dtype != torch.float32
    ):
        raise SpmdZeroUsageError(
            f"{name} is {tensor.dtype}, but the config asks for fp32. "
            'Call model.float(), or set "bf16": {"enabled": true}'
        )
