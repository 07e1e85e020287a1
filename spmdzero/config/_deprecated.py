"""DeepSpeed's older and second spellings, replaced by the ones that the models read."""

import logging
from typing import Any

from spmdzero.config._types import flag, lower
from spmdzero.errors import SpmdZeroConfigError

_logger = logging.getLogger("spmdzero")

DEPRECATED: dict[str, str] = {
    "aio.thread_count": "aio.intra_op_parallelism",
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}
"""Older spelling, which works with a warning -> present spelling."""

_BY_FIELD = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
    "max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save "
    "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"
)
SECOND_SPELLINGS: dict[str, str] = {
    f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _BY_FIELD.split()
}
"""Second spelling, which DeepSpeed accepts because its field has that name -> usual spelling."""

_TO_THE_HOST = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
}
_STILL_WARN = {
    **_TO_THE_HOST,
    "zero_optimization.cpu_offload_use_pin_memory": (
        "zero_optimization.offload_optimizer.pin_memory"
    ),
}


def modernise(config: dict[str, Any]) -> None:
    """Replaces, in place, each older spelling by the present one, with a warning.

    Raises:
        SpmdZeroConfigError: both spellings are given, with different values.
    """
    if isinstance(config.get("zero_optimization"), bool):
        stage = int(config["zero_optimization"])
        _logger.warning('the boolean "zero_optimization" is deprecated, write {"stage": %d}', stage)
        config["zero_optimization"] = {"stage": stage}
    for old, new in {**DEPRECATED, **SECOND_SPELLINGS}.items():
        _rename(config, old=old, new=new)
    for old, new in _STILL_WARN.items():
        if holder_of(config, old)[0] is not None:
            _warn(old, new)
    for old, new in _TO_THE_HOST.items():
        _offloaded(config, old=old, new=new)


def holder_of(config: Any, key: str) -> tuple[dict[str, Any] | None, str]:
    """The object that holds a dotted key, or None if the key isn't given; and its last part."""
    *parents, name = key.split(".")
    holder = config
    for parent in parents:
        holder = holder.get(parent) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) and name in holder else None), name


def _rename(config: dict[str, Any], *, old: str, new: str) -> None:
    holder, name = holder_of(config, old)
    if holder is None:
        return
    if old in DEPRECATED:
        _warn(old, new)
    value, present = holder.pop(name), new.rpartition(".")[2]
    if present in holder and holder[present] != value:
        raise SpmdZeroConfigError(
            key=old,
            value=value,
            reason=f"this is another spelling of {new!r}, which is given too with another value",
            fix=f"Remove {old!r}.",
        )
    holder[present] = value


def _offloaded(config: dict[str, Any], *, old: str, new: str) -> None:
    holder, name = holder_of(config, old)
    if holder is None or flag(holder[name]) is not True:
        return
    section = holder.get(new.rpartition(".")[2]) or {}
    if not isinstance(section, dict):
        return
    if lower(section.get("device", "cpu")) != "cpu":
        raise SpmdZeroConfigError(
            key=old,
            value=holder[name],
            reason=f"{new}.device is given too, as {section['device']!r}",
            fix=f"Remove {old!r}.",
        )
    del holder[name]
    holder[new.rpartition(".")[2]] = {**section, "device": "cpu"}


def _warn(old: str, new: str) -> None:
    _logger.warning("the config key %r is deprecated, write %r", old, new)
