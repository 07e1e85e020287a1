"""Keys that DeepSpeed doesn't know and silently ignores: comments, old names, misspellings."""

import logging
from collections.abc import Mapping, Set
from typing import Any

from spmdzero._logging import is_new
from spmdzero._names import did_you_mean
from spmdzero.config._models import SECTIONS
from spmdzero.config._must_be_off import OFF_ONLY, OffSection
from spmdzero.config._optimizers import OPTIMIZERS
from spmdzero.config._schedules import SCHEDULES
from spmdzero.config._screen import off_names

_logger = logging.getLogger("spmdzero")
_IGNORED = "DeepSpeed doesn't know the config key %r and ignores it, as is done here%s"

IGNORING = [
    "activation_checkpointing",
    "aio",
    "autotuning",
    "checkpoint",
    "checkpoint.parallel_write",
    "data_efficiency",
    "data_types",
    "expert_parallel",
    "flops_profiler",
    "optimizer",
    "scheduler",
    "timers",
    "torch_autocast",
]
"""The sections that DeepSpeed reads key by key, so that it never sees an unknown key.

DeepSpeed reads other sections as pydantic models without extra keys (runtime/config_utils.py).
"""

# What a key of another library, or of an older DeepSpeed, is called here.
_MEANT = {
    "fp32_allreduce": "communication_data_type",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "max_grad_norm": "gradient_clipping",
}


def ignore_unknown(config: dict[str, Any]) -> None:
    """Removes, in place, keys that DeepSpeed doesn't know and ignores; logs each key once."""
    top = known_names("")
    for name in [name for name in config if name not in top]:
        del config[name]
        _say(name, _resembled(name, top))
    for section in IGNORING:
        holder: Any = config
        for part in section.split("."):
            holder = holder.get(part) if isinstance(holder, Mapping) else None
        if not isinstance(holder, dict):
            continue
        known = known_names(section)
        for name in [name for name in holder if name not in known]:
            del holder[name]
            _say(f"{section}.{name}", _of_params(section, name) or did_you_mean(name, known))


def known_names(section: str) -> Set[str]:
    """The keys of a section, by its dotted path, that spmdzero or DeepSpeed knows."""
    rule = OFF_ONLY.get(section)
    if isinstance(rule, OffSection):
        return {*rule.off, *rule.idle}
    return {*SECTIONS[section].json_keys(), *off_names(section)}


def _resembled(name: str, known: Set[str]) -> str:
    if "comment" in name.lower() or not name[:1].isalpha():
        # Otherwise "_comment" would resemble "comet".
        return ""
    if name in _MEANT:
        return f"Did you mean {_MEANT[name]!r}?"
    # "stage" or "loss_scale" at the top level is a section's key in the wrong place.
    homes = [at for at, model in SECTIONS.items() if at and name in model.json_keys()]
    if len(homes) == 1:
        return f"Did you mean {f'{homes[0]}.{name}'!r}?"
    return did_you_mean(name, known)


def _of_params(section: str, name: str) -> str:
    """A question for a parameter that stands beside ``params``, "" for another key."""
    models = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULES}.get(section, {})
    known = any(name in model.json_keys() for model in models.values())
    return f"Did you mean {f'{section}.params.{name}'!r}?" if known else ""


def ignored(key: str) -> str:
    """The start of the line about a key that DeepSpeed doesn't know."""
    return _IGNORED % (key, "")


def _say(key: str, hint: str) -> None:
    if is_new(("ignored key", key)):
        _logger.warning(_IGNORED, key, hint and f". {hint}")
