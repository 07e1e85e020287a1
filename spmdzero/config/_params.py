"""The parameters that each optimizer and each learning-rate schedule takes."""

import inspect
import math
from typing import Annotated, Any, Literal, TypeGuard

import torch
from pydantic import AfterValidator, Field, create_model, field_validator, model_validator
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._refused_optimizers import REFUSED_OPTIMIZERS
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


class _Params(Section):
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


class _OptimizerParams(_Params):
    lr: Rate = 1e-3


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


class AdagradParams(_Params):
    """Parameters of Adagrad, as in torch.optim.Adagrad."""

    lr: Rate = 1e-2
    lr_decay: Rate = 0.0
    weight_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0
    eps: Rate = 1e-10


class LionParams(_OptimizerParams):
    """Parameters of Lion, with FusedLion's defaults."""

    betas: _Betas = (0.9, 0.999)
    weight_decay: Rate = 0.0


class LambParams(_OptimizerParams):
    """Parameters of Lamb, with FusedLamb's defaults."""

    betas: _Betas = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    max_coeff: Rate = 10.0
    min_coeff: Rate = 0.01


class MuonParams(_Params):
    """Parameters of Muon and of the Adam that trains what is no matrix."""

    lr: Rate | None = None
    muon_lr: Rate | None = None
    adam_lr: Rate | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Rate = 0.0
    ns_method: Literal["gram", "standard"] = "gram"
    betas: _Betas = (0.9, 0.95)
    eps: Rate = 1e-10
    adam_w_mode: bool = True
    torch_adam: bool = False
    per_head_muon: bool = False

    @field_validator("per_head_muon")
    @classmethod
    def _whole_matrices(cls, per_head: bool) -> bool:
        if per_head:
            raise RefusedValueError(
                "Muon orthogonalises whole matrices here, not one attention head at a time",
                fix="Write false, or leave it out.",
            )
        return per_head


OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
}
"""DeepSpeed's optimizers of this release and the parameters of each."""


def torch_optimizer(name: str) -> type[Optimizer] | None:
    """The class of torch.optim of this name, if there is one."""
    found = getattr(torch.optim, name, None)
    if not inspect.isclass(found) or found is Optimizer or not issubclass(found, Optimizer):
        return None
    return found


def optimizer_name(name: str) -> str:
    """The canonical spelling of an optimizer's name; DeepSpeed reads its own in any case."""
    canonical = {known.lower(): known for known in OPTIMIZERS}.get(name.lower())
    if canonical:
        return canonical
    if name.lower() in REFUSED_OPTIMIZERS:
        reason, fix = REFUSED_OPTIMIZERS[name.lower()]
        raise RefusedValueError(reason, fix=fix)
    if torch_optimizer(name):
        return name
    raise RefusedValueError(
        "spmdzero has no optimizer of this name",
        fix=f"Use one of {', '.join(OPTIMIZERS)}, or a class of torch.optim.",
    )


def torch_optimizer_params(name: str) -> type[Section]:
    """The parameters of a torch.optim class, by name only: torch checks the values."""
    return _arguments(name, torch_optimizer(name) or Optimizer, without="params")


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


class OneCycleParams(Section):
    """Parameters of OneCycle."""

    cycle_min_lr: _Rates
    cycle_max_lr: _Rates
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Annotated[float, Field(gt=0)] = 2000
    cycle_second_step_size: Rate | None = None
    cycle_first_stair_count: Annotated[int, Field(ge=0)] = 0
    cycle_second_stair_count: Annotated[int, Field(ge=0)] | None = None
    decay_step_size: Rate = 0
    cycle_momentum: bool = True
    cycle_min_mom: _Rates = 0.8
    cycle_max_mom: _Rates = 0.9
    decay_mom_rate: Rate = 0.0
    last_batch_iteration: int = -1


class LRRangeTestParams(Section):
    """Parameters of LRRangeTest."""

    lr_range_test_min_lr: _Rates = 1e-3
    lr_range_test_step_size: _Steps = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1


SCHEDULES: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
"""DeepSpeed's own schedules of this release and the parameters of each."""


def _torch_schedule(name: str) -> type[LRScheduler] | None:
    found = getattr(torch.optim.lr_scheduler, name, None)
    if name.startswith("_") or found is LRScheduler or not inspect.isclass(found):
        return None
    return found if issubclass(found, LRScheduler) else None


def check_schedule_name(name: str) -> str:
    """The name, if DeepSpeed or torch has a schedule of that name that this release runs."""
    if name in SCHEDULES or _torch_schedule(name):
        return name
    raise RefusedValueError(
        "there is no schedule of this name",
        fix=f"Use {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler.",
    )


def torch_schedule_params(name: str) -> type[Section]:
    """The parameters of a torch.optim.lr_scheduler class, by name only: torch checks the values."""
    return _arguments(name, _torch_schedule(name) or LRScheduler, without="optimizer")


def _arguments(name: str, cls: type, *, without: str) -> type[Section]:
    fields: dict[str, Any] = {
        parameter.name: (Any, ... if parameter.default is parameter.empty else parameter.default)
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.name != without
    }
    return create_model(name, __base__=Section, **fields)
