"""The parameters that each optimizer and each learning-rate schedule takes."""

import inspect
import math
from typing import Annotated, Any, Literal, TypeGuard

import torch
from pydantic import AfterValidator, Field, create_model, field_validator, model_validator
from torch.optim.lr_scheduler import LRScheduler

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._types import Rate, Section


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _two_decays(value: object) -> object:
    numbers = value if isinstance(value, list | tuple) else ()
    if len(numbers) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in numbers):
        raise RefusedValueError(
            "betas are two numbers from 0 and below 1", fix="Write for example [0.9, 0.999]."
        )
    return value


_Betas = Annotated[Any, AfterValidator(_two_decays)]


class _OptimizerParams(Section):
    lr: Rate = 1e-3

    @model_validator(mode="before")
    @classmethod
    def _clip_elsewhere(cls, params: object) -> object:
        if isinstance(params, dict) and "max_grad_norm" in params:
            raise RefusedValueError(
                "clipping is not a parameter of the optimizer",
                fix="Use the key gradient_clipping of the top level, as in DeepSpeed.",
                at=("max_grad_norm",),
            )
        return params


class AdamParams(_OptimizerParams):
    """Parameters of Adam and AdamW; ``torch_adam`` picks among implementations, here one."""

    betas: _Betas = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    bias_correction: bool = True
    adam_w_mode: bool = True
    torch_adam: bool = False
    amsgrad: bool = False

    @field_validator("amsgrad")
    @classmethod
    def _no_third_moment(cls, amsgrad: bool) -> bool:
        if amsgrad:
            raise RefusedValueError(
                "AMSGrad is not supported, nor by DeepSpeed's Adam", fix="Write false."
            )
        return amsgrad


class SGDParams(_OptimizerParams):
    """Parameters of SGD, as in torch.optim.SGD."""

    momentum: Rate = 0.0
    dampening: float = 0.0
    weight_decay: Rate = 0.0
    nesterov: bool = False


OPTIMIZERS: dict[str, type[Section]] = {"Adam": AdamParams, "AdamW": AdamParams, "SGD": SGDParams}
"""The optimizers of this release and the parameters of each."""

_USE_ONE_OF = f"Use one of {', '.join(OPTIMIZERS)}."
_LATER_OPTIMIZERS = {"adagrad", "lion", "lamb", "muon"}
_COMPRESSED_OPTIMIZERS = {"onebitadam", "onebitlamb", "zerooneadam"}
_HOST_OPTIMIZERS = {"cpuadam", "deepspeedcpuadam", "deepspeedcpuadagrad", "deepspeedcpulion"}


def optimizer_name(name: str) -> str:
    """The canonical spelling of an optimizer's name, which DeepSpeed reads in any case."""
    canonical = {known.lower(): known for known in OPTIMIZERS}.get(name.lower())
    if canonical:
        return canonical
    if name.lower() in _LATER_OPTIMIZERS:
        reason = "this optimizer comes in a later release"
    elif name.lower() in _COMPRESSED_OPTIMIZERS:
        reason = "1-bit optimizers compress messages that the XLA compiler sends, not spmdzero"
    elif name.lower() in _HOST_OPTIMIZERS:
        reason = "the optimizer state is sharded over the devices' memory and never on the host"
    else:
        reason = "spmdzero has no optimizer of this name"
    raise RefusedValueError(reason, fix=_USE_ONE_OF)


def _rates(value: object) -> object:
    for rate in value if isinstance(value, list | tuple) else [value]:
        if not _is_number(rate) or not 0 <= rate < math.inf:
            raise RefusedValueError(
                "this is not a number from 0 or a list of them",
                fix="Write a number, or one number for each parameter group.",
            )
    return value


_Rates = Annotated[Any, AfterValidator(_rates)]


# DeepSpeed's schedules want a true int here, unlike its bucket sizes.
_Steps = Annotated[int, Field(gt=0)]


class _Warmup(Section):
    warmup_num_steps: _Steps = 1000
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: int = -1


class WarmupLRParams(_Warmup):
    """Parameters of WarmupLR."""

    warmup_min_lr: _Rates = 0.0
    warmup_max_lr: _Rates | None = None


class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of WarmupDecayLR."""

    warmup_max_lr: _Rates | None = 0.001
    total_num_steps: _Steps


class WarmupCosineLRParams(_Warmup):
    """Parameters of WarmupCosineLR."""

    total_num_steps: _Steps
    warmup_min_ratio: Rate = 0.0
    cos_min_ratio: Rate = 0.0001


SCHEDULES: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
"""DeepSpeed's own schedules of this release and the parameters of each."""

_LATER_SCHEDULES = {"OneCycle", "LRRangeTest"}


def _torch_schedule(name: str) -> type[LRScheduler] | None:
    found = getattr(torch.optim.lr_scheduler, name, None)
    if name.startswith("_") or found is LRScheduler or not inspect.isclass(found):
        return None
    return found if issubclass(found, LRScheduler) else None


def check_schedule_name(name: str) -> str:
    """The name, if DeepSpeed or torch has a schedule of that name that this release runs."""
    if name in SCHEDULES or _torch_schedule(name):
        return name
    later = name in _LATER_SCHEDULES
    raise RefusedValueError(
        "this schedule comes in a later release" if later else "there is no schedule of this name",
        fix=f"Use {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler.",
    )


def torch_schedule_params(name: str) -> type[Section]:
    """The parameters of a torch.optim.lr_scheduler class, by name only: torch checks the values."""
    signature = inspect.signature(_torch_schedule(name) or LRScheduler)
    fields: dict[str, Any] = {
        parameter.name: (Any, ... if parameter.default is parameter.empty else parameter.default)
        for parameter in signature.parameters.values()
        if parameter.name != "optimizer"
    }
    return create_model(name, __base__=Section, **fields)
