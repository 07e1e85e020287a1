"""The learning-rate schedules by name, with their parameters."""

import inspect
import logging
import math
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from spmdzero._logging import is_new
from spmdzero._names import did_you_mean
from spmdzero.config._errors import RefusedValueError
from spmdzero.config._params import class_parameters, is_number
from spmdzero.config._types import Rate, Section

_logger = logging.getLogger("spmdzero")


def _rates(value: object) -> object:
    for rate in value if isinstance(value, list | tuple) else [value]:
        if not is_number(rate) or not 0 <= rate < math.inf:
            raise RefusedValueError(
                "this is not a number from 0 or a list of them",
                fix="Write a number, or one number for each parameter group.",
            )
    return value


_Rates = Annotated[Any, AfterValidator(_rates)]


def _known_curve(value: object) -> object:
    # DeepSpeed warns of it and takes "log" (runtime/lr_schedules.py), and real files have "cosine".
    if value not in ("log", "linear") and is_new(("warmup_type", repr(value))):
        text = (
            'warmup_type is %r, which is neither "log" nor "linear": the warm-up is "log", as in '
            "DeepSpeed"
        )
        _logger.warning(text, value)
    return value


_Curve = Annotated[Any, AfterValidator(_known_curve)]


# DeepSpeed's schedules require a true int here, unlike its bucket sizes.
_Steps = Annotated[int, Field(gt=0)]
_Above0 = Annotated[float, Field(gt=0)]


class _Warmup(Section):
    warmup_num_steps: _Steps = 1000
    warmup_type: _Curve = "log"
    last_batch_iteration: int = -1


class WarmupLRParams(_Warmup):
    """Parameters of WarmupLR."""

    warmup_min_lr: _Rates = 0.0
    warmup_max_lr: _Rates | None = None


class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of WarmupDecayLR."""

    warmup_max_lr: _Rates | None = 0.001
    total_num_steps: _Above0


class WarmupCosineLRParams(_Warmup):
    """Parameters of WarmupCosineLR."""

    total_num_steps: _Above0
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001


class OneCycleParams(Section):
    """Parameters of OneCycle."""

    cycle_min_lr: _Rates
    cycle_max_lr: _Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: _Above0 = 2000
    cycle_second_step_size: Rate | None = None
    cycle_first_stair_count: Rate = 0
    cycle_second_stair_count: Rate | None = None
    decay_step_size: Rate = 0
    cycle_momentum: bool = True
    cycle_min_mom: _Rates = 0.8
    cycle_max_mom: _Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1


class LRRangeTestParams(Section):
    """Parameters of LRRangeTest."""

    lr_range_test_min_lr: _Rates = 1e-3
    lr_range_test_step_size: _Steps = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1


SCHEDULES: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
"""Name of a schedule of DeepSpeed 0.19.8 -> its parameters."""


def schedule_params(name: str) -> type[Section]:
    """The parameters of a schedule by its checked name, see `schedule_name`."""
    found = SCHEDULES.get(name)
    return found or class_parameters(_of_torch()[name], without="optimizer")


def schedule_name(name: str) -> str:
    """Returns `name` if DeepSpeed or torch has such a schedule; case counts, as in DeepSpeed."""
    if name in SCHEDULES:
        return name
    of_torch = _of_torch()
    if name in of_torch:
        return name
    near = did_you_mean(name, [*SCHEDULES, *of_torch])
    raise RefusedValueError(
        "there is no schedule of this name",
        fix=f"{near} Use {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler.".lstrip(),
    )


def _of_torch() -> dict[str, type]:
    # Imported here, so that a config without a class of torch is read without torch.
    from torch.optim import lr_scheduler

    base = lr_scheduler.LRScheduler
    return {
        known: cls
        for known, cls in vars(lr_scheduler).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base and known[0] != "_"
    }
