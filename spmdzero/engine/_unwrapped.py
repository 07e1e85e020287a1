"""Takes a module out of what a GPU script has wrapped it in."""

from torch import nn

from spmdzero._logging import log_once

# What a wrapper is called, and why nothing is lost without it.
_COMPILED = "torch.compile", "XLA compiles every step"
_PARALLEL = "DistributedDataParallel", "the step's program sums the gradients of all devices"
_THREADED = "DataParallel", "the engine gives each device its rows"


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module that wrappers for GPUs hold, and logs each wrapper that it takes off.

    `torch.compile(model)`, `DistributedDataParallel(model)` and `DataParallel(model)` are such
    wrappers. A submodule that was compiled keeps its wrapper, which `engine(...)` calls uncompiled.
    """
    while True:
        inner, said = _inside(model)
        if inner is None:
            break
        name, reason = said
        log_once(f"{name}(model) has no effect of its own: {reason}. The module in it is trained")
        model = inner
    parts = sorted(name for name, module in model.named_modules() if _is_compiled(module))
    if parts:
        shown = ", ".join(name or "the model" for name in parts[:3])
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        log_once(
            f"torch.compile of {shown}{more} has no effect of its own: XLA compiles every step"
        )
    return model


def _inside(model: nn.Module) -> tuple[nn.Module | None, tuple[str, str]]:
    """The module that a wrapper holds, None for no wrapper; its name and reason."""
    inner, said = model._modules.get("_orig_mod"), _COMPILED
    if inner is None or not _is_compiled(model):
        if not isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            return None, ("", "")
        inner, said = model.module, _THREADED
        if isinstance(model, nn.parallel.DistributedDataParallel):
            said = _PARALLEL
            # No other tensors may replace parameters that this C++ code holds.
            for name in ("reducer", "logger"):
                vars(model).pop(name, None)
    # The script may call its wrapper, which calls the module from now on. This is an attribute of
    # the object: by `setattr` torch would make it one of the module.
    vars(model)["forward"] = inner.__call__
    return inner, said


def _is_compiled(module: nn.Module) -> bool:
    # Without torch.compile, which brings it, importing torch._dynamo would take seconds.
    return hasattr(module, "_torchdynamo_orig_callable") or module._compiled_call_impl is not None
