"""The value "auto", which Hugging Face's integration fills in before DeepSpeed sees the config."""

import copy
import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from spmdzero.config._deprecated import holder_of
from spmdzero.config._models import SECTIONS
from spmdzero.errors import SpmdZeroConfigError

_logger = logging.getLogger("spmdzero")

AUTO = "auto"

# transformers.TrainingArguments' defaults, which its Trainer fills in
# (transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_process).
_OPTIMIZER = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}


class _Known(NamedTuple):
    """A number that only the user knows, and a substitute that changes no program.

    ``argument`` is the Trainer's argument, ``stand_in`` its default or a small count.
    """

    what: str
    argument: str
    stand_in: float


_UNKNOWN = {
    "optimizer.params.lr": _Known("the learning rate", "learning_rate", 5e-5),
    "scheduler.params.total_num_steps": _Known("the number of steps", "max_steps", 1000),
    "scheduler.params.warmup_num_steps": _Known("the length of the warm-up", "warmup_steps", 100),
}


def resolve_auto(config: dict[str, Any]) -> None:
    """Replaces, in place, each "auto" outside the section ``spmd``, and logs the new values.

    The optimizer's ``betas``, ``eps`` and ``weight_decay`` get the values of Hugging Face's
    TrainingArguments, ``warmup_min_lr`` gets 0 and ``warmup_max_lr`` the optimizer's learning rate.
    Each other "auto" becomes its key's default, as in DeepSpeed's runtime/config_utils.py. A batch
    size then follows from the others or is missing in `resolve_batch_sizes`.

    Raises:
        SpmdZeroConfigError: an "auto" is in place of a number that only the user knows.
    """
    read = _resolve(config)
    if read:
        shown = ", ".join(f"{key} as {value}" for key, value in read.items())
        _logger.info('config keys that are "auto" are read: %s', shown)


def with_stand_ins(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of a config without "auto", for a caller that describes a run and doesn't run it.

    It works like `resolve_auto`, with substitutes for numbers that only the user knows, such as the
    learning rate.

    Returns the copy, and the dotted name of each key that was "auto" -> its value.
    """
    filled = copy.deepcopy(dict(config))
    chosen = {}
    for key, known in _UNKNOWN.items():
        holder, name = holder_of(filled, key)
        if holder is not None and holder[name] == AUTO:
            holder[name] = known.stand_in
            chosen[key] = f"{known.stand_in:g}"
    return filled, chosen | _resolve(filled)


def _resolve(config: dict[str, Any]) -> dict[str, str]:
    chosen = {
        key: value
        for section in ("optimizer", "scheduler")
        for key, value in _resolve_params(config, section).items()
    }
    for name in [name for name in config if name != "spmd"]:
        chosen |= _drop(config, name, path=name)
    return chosen


def _resolve_params(config: dict[str, Any], section: str) -> dict[str, str]:
    holder = config.get(section)
    params = holder.get("params") if isinstance(holder, dict) else None
    if not isinstance(params, dict):
        return {}
    chosen = {}
    for name in [name for name, value in params.items() if value == AUTO]:
        key = f"{section}.params.{name}"
        if key in _UNKNOWN:
            known = _UNKNOWN[key]
            raise SpmdZeroConfigError(
                key=key,
                value=AUTO,
                reason=f"nothing here tells {known.what}; Hugging Face's Trainer takes it from its "
                f"argument {known.argument}",
                fix="Write the number.",
            )
        if section == "optimizer" and name in _OPTIMIZER:
            params[name] = _OPTIMIZER[name]
        elif key == "scheduler.params.warmup_min_lr":
            params[name] = 0.0
        elif key == "scheduler.params.warmup_max_lr":
            params[name] = _learning_rate(config)
        else:
            continue
        chosen[key] = repr(params[name])
    return chosen


def _learning_rate(config: dict[str, Any]) -> object:
    optimizer = config.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    # The schedules read null as the learning rate of their optimizer.
    return params.get("lr") if isinstance(params, dict) else None


def _drop(holder: dict[str, Any], name: str, *, path: str) -> dict[str, str]:
    value = holder[name]
    if isinstance(value, dict):
        dropped = [_drop(value, inner, path=f"{path}.{inner}") for inner in list(value)]
        return {key: read for each in dropped for key, read in each.items()}
    # A whole section or the name of a class has no default for "auto".
    if value != AUTO or path in SECTIONS or path in ("optimizer.type", "scheduler.type"):
        return {}
    del holder[name]
    return {path: _default(path)}


def _default(path: str) -> str:
    section, _, name = path.rpartition(".")
    model = SECTIONS.get(section)
    field = model.model_fields.get(model.json_keys().get(name, "")) if model is not None else None
    known = field is not None and field.default not in (None, PydanticUndefined)
    return f"its default, {json.dumps(field.default)}" if field and known else "its default"
