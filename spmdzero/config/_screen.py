"""Reading DeepSpeed's whole vocabulary, so that the models see only what spmdzero honours."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

from spmdzero.config._errors import unknown_key
from spmdzero.config._keys import NO_MEANING, REMOVED
from spmdzero.config._off import OFF_ONLY, OffSection
from spmdzero.errors import SpmdZeroConfigError

_logger = logging.getLogger("spmdzero")


def screened(source: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of the config without the keys that ask for nothing.

    Raises:
        SpmdZeroConfigError: a key asks for what spmdzero doesn't do, or a value is "auto".
    """
    _reject_auto(source, path="")
    config = _modern(copy.deepcopy(dict(source)))
    for key, reason in REMOVED.items():
        holder, name = _holder(config, key)
        if holder is not None:
            _check_removed(holder.pop(name), key=key, reason=reason)
    for key, rule in OFF_ONLY.items():
        holder, name = _holder(config, key)
        if holder is None:
            continue
        value = holder.pop(name)
        if isinstance(rule, OffSection):
            _check_section(value, key=key, rule=rule)
        elif not _asks_nothing(value, off=rule.off):
            raise SpmdZeroConfigError(key=key, value=value, reason=rule.reason, fix=rule.fix)
    return config


def keys_without_meaning(source: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted names of the given keys that change nothing."""
    return tuple(key for key in NO_MEANING if _holder(source, key)[0] is not None)


def off_names(section: str) -> set[str]:
    """The keys of a section that are only accepted while they ask for nothing."""
    keys = (key.rpartition(".") for key in OFF_ONLY)
    return {name for parent, _, name in keys if parent == section}


def _holder(config: Mapping[str, Any], key: str) -> tuple[Any, str]:
    *parents, name = key.split(".")
    holder: Any = config
    for parent in parents:
        holder = holder.get(parent) if isinstance(holder, Mapping) else None
    return (holder, name) if isinstance(holder, Mapping) and name in holder else (None, name)


def _reject_auto(value: object, *, path: str) -> None:
    if isinstance(value, str) and value == "auto":
        raise SpmdZeroConfigError(
            key=path,
            value=value,
            reason="spmdzero does not fill in values yet",
            fix="Write the number, or remove the key to use its default.",
        )
    items = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    for name, item in items:
        if isinstance(value, Mapping) and not isinstance(name, str):
            raise SpmdZeroConfigError(
                key=path or "config", value=name, reason="a key is not a string", fix="Use strings."
            )
        # "auto" is one of the values of spmd.reduction.
        if name != "spmd" or path:
            _reject_auto(item, path=f"{path}.{name}".lstrip("."))


def _modern(config: dict[str, Any]) -> dict[str, Any]:
    """The config with DeepSpeed's deprecated spellings replaced."""
    if "bfloat16" in config:
        if "bf16" in config:
            raise SpmdZeroConfigError(
                key="bfloat16",
                value=config["bfloat16"],
                reason="this is the deprecated spelling of 'bf16', which is given too",
                fix="Remove 'bfloat16'.",
            )
        _logger.warning("the config key 'bfloat16' is deprecated, write 'bf16'")
        config["bf16"] = config.pop("bfloat16")
    if config.get("zero_optimization") is True:
        raise SpmdZeroConfigError(
            key="zero_optimization",
            value=True,
            reason="the boolean form is deprecated and doesn't say which stage",
            fix='Write {"stage": 1}, which is what DeepSpeed reads here, or {"stage": 2}.',
        )
    if config.get("zero_optimization") is False:
        config["zero_optimization"] = {"stage": 0}
    return config


def _check_removed(value: object, *, key: str, reason: str) -> None:
    off = value.get("enabled") is False if isinstance(value, Mapping) and value else not value
    if not off:
        raise SpmdZeroConfigError(key=key, value=value, reason=reason, fix="Remove the key.")


def _check_section(value: object, *, key: str, rule: OffSection) -> None:
    if value is None or value is False:
        return
    if not isinstance(value, Mapping):
        raise SpmdZeroConfigError(key=key, value=value, reason=rule.reason, fix=rule.fix)
    for name, off in rule.off.items():
        if not _asks_nothing(value.get(name), off=off):
            raise SpmdZeroConfigError(
                key=f"{key}.{name}", value=value[name], reason=rule.reason, fix=rule.fix
            )
    known = {*rule.off, *(rule.idle or ()), *off_names(key)}
    for name, item in value.items():
        if rule.idle is not None and name not in known:
            raise unknown_key(section=key, name=name, value=item, known=known)


def _asks_nothing(value: object, *, off: object) -> bool:
    if isinstance(value, str) and isinstance(off, str):
        return value.lower() == off.lower()
    # In Python True equals 1, in a config it doesn't.
    return value is None or (isinstance(value, bool) == isinstance(off, bool) and value == off)
