"""Says what to write in the place of CUDA, where a script asks for it and there is none.

torch names NVIDIA's driver then, or turns the script's mixed precision off with a warning.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from spmdzero._logging import is_new

logger = logging.getLogger("spmdzero")
_MODEL = (
    "leave .cuda() and .to('cuda') of a model out: spmdzero.initialize places it on the devices"
)
_TENSOR = (
    "leave .cuda() and .to('cuda') of a batch out, which the engine places, and write "
    ".to(engine.device) and device=engine.device for what is computed beside it; a local rank is "
    "a device to tensor.to, module.to, torch.tensor and torch.as_tensor alone"
)
_AUTOCAST = (
    "is off, as there is no CUDA: spmdzero's devices compute in the dtypes of the model. Write "
    '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} or "bf16": {"enabled": true} into '
    "the config, or torch.autocast(engine.device.type, dtype=torch.bfloat16)"
)
_SCALER = (
    'GradScaler is for CUDA, which is not here: "fp16": {"enabled": true} in the config scales the '
    "loss. Write engine.backward(loss) and engine.step() in the place of scaler.scale(loss)"
    ".backward() and scaler.step(optimizer), which knows no schedule and no accumulation"
)
_GROUP = "there is no CUDA here: gloo connects the hosts in the place of nccl, and XLA the devices"
INSTEAD = {
    "current_device": "current_device()",
    "get_device_name": "device_name()",
    "get_rng_state": "get_rng_state()",
    "mem_get_info": "available_memory()",
    "set_device": "set_device(...)",
    "set_rng_state": "set_rng_state(...)",
    "synchronize": "synchronize()",
}
"""Function of ``torch.cuda`` -> the call of `spmdzero.get_accelerator()` that does the same."""


@functools.cache
def explain(torch: ModuleType) -> None:
    """Has torch's errors and warnings about CUDA say what to write, if this process has none.

    Functions of torch's that are replaced: ``torch.cuda._lazy_init``, which torch's C++ code too
    calls by its name before anything of CUDA, ``torch.cuda.set_device``, and the constructors of
    ``torch.autocast`` and ``torch.amp.GradScaler``. A process group of NCCL is one of gloo, by
    which hosts are connected: ``torch.distributed``'s ``init_process_group`` and ``new_group``.
    Where CUDA is there, all do what they did.
    """
    # It imports torch, whose import this module waits for.
    from spmdzero._replaced import in_place_of

    misleads = "it names NVIDIA's driver, or turns mixed precision off, where there is no CUDA"
    in_place_of(torch.cuda, "_lazy_init", because=misleads)(_or_what_to_write)
    # Without CUDA's code torch has no such function in C++.
    in_place_of(torch.cuda, "set_device", because=misleads)(_or_what_to_write)
    in_place_of(torch.autocast, "__init__", because=misleads)(_autocast)
    in_place_of(torch.amp.GradScaler, "__init__", because=misleads)(_scaler)
    if torch.distributed.is_available():
        nccl = "scripts for GPUs make their process group by NCCL, which needs CUDA"
        for owner in (torch.distributed.distributed_c10d, torch.distributed):
            in_place_of(owner, "init_process_group", because=nccl)(_group)
            in_place_of(owner, "new_group", because=nccl)(_group)


def _or_what_to_write(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except (AssertionError, AttributeError, RuntimeError) as error:
        if _is_there() or getattr(error, "explained", False):
            raise
        line, write = _asked(call.__name__)
        kind = AssertionError if isinstance(error, AttributeError) else type(error)
        told = kind(f"{error}\n{line}: there is no CUDA here. In a script for spmdzero {write}")
        told.explained = True  # type: ignore[attr-defined]
        raise told from error


def _autocast(
    begin: Callable[..., None], self: Any, device_type: Any, *args: Any, **kw: Any
) -> None:
    enabled = kw.get("enabled", args[1] if len(args) > 1 else True)
    if device_type != "cuda" or not enabled or _is_there():
        begin(self, device_type, *args, **kw)
        return
    line, _ = _asked()
    try:
        begin(self, device_type, *args, **kw)
    except RuntimeError as error:
        # torch asks a device that isn't there whether it has bf16.
        raise RuntimeError(f'{error}\n{line}: torch.autocast("cuda") {_AUTOCAST}') from error
    _warn(f'{line}: torch.autocast("cuda") {_AUTOCAST}', of="autocast")


def _scaler(begin: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    begin(self, *args, **kwargs)
    device = kwargs.get("device", args[0] if args else "cuda")
    if device == "cuda" and kwargs.get("enabled", True) and not _is_there():
        _warn(f"{_asked()[0]}: {_SCALER}", of="scaler")


def _group(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    told = inspect.signature(make).bind(*args, **kwargs)
    backend = str(told.arguments.get("backend") or "")
    if "nccl" not in backend.lower() or _is_there():
        return make(*args, **kwargs)
    _warn(f"{_asked()[0]}: {backend!r}: {_GROUP}", of="nccl")
    told.arguments["backend"] = "gloo"
    # It would be a GPU.
    told.arguments.pop("device_id", None)
    return make(*told.args, **told.kwargs)


def warn_of_cpus_autocast(line: str) -> None:
    """Warns once that ``torch.autocast("cpu")`` is around the engine's forward at `line`."""
    _warn(f'{line}: torch.autocast("cpu") around the engine {_AUTOCAST}', of="cpu")


def _warn(message: str, *, of: str) -> None:
    if is_new(f"no CUDA: {of}"):
        logger.warning("%s", message)


def _is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def _asked(call: str = "") -> tuple[str, str]:
    """The line of the script that asks for CUDA by a call, and what to write there."""
    from torch import nn

    from spmdzero._user_line import frames_below, user_line

    asked, model = call, False
    for frame in frames_below():
        model = model or isinstance(frame.f_locals.get("self"), nn.Module)
        if frame.f_globals.get("__name__", "").startswith("torch.cuda"):
            asked = frame.f_code.co_name
    line, write = user_line(otherwise="this call"), _MODEL if model else _TENSOR
    if not model and asked and not asked.startswith("_"):
        write = f"leave torch.cuda.{asked} out"
        if asked in INSTEAD:
            write += f", or write spmdzero.get_accelerator().{INSTEAD[asked]}"
    return line, write
