"""Removes DeepSpeed's other keys, so that the models see only keys that spmdzero honours."""

import logging
from collections.abc import Mapping
from typing import Any

from spmdzero._logging import is_new
from spmdzero.config._deprecated import holder_of
from spmdzero.config._errors import unknown_key
from spmdzero.config._keys import REMOVED
from spmdzero.config._must_be_off import OFF_ONLY, OffSection
from spmdzero.config._types import flag
from spmdzero.errors import SpmdZeroConfigError

_logger = logging.getLogger("spmdzero")


def screen(config: dict[str, Any]) -> None:
    """Removes, in place, keys that the models don't know and that ask for nothing.

    Raises:
        SpmdZeroConfigError: a key asks for something that spmdzero doesn't do.
    """
    _without_curriculum(config)
    for key, reason in REMOVED.items():
        holder, name = holder_of(config, key)
        if holder is not None:
            _check_removed(holder.pop(name), key=key, reason=reason)
    for key, rule in OFF_ONLY.items():
        holder, name = holder_of(config, key)
        if holder is None:
            continue
        value = holder.pop(name)
        if isinstance(rule, OffSection):
            _check_section(value, key=key, rule=rule)
        elif not _asks_nothing(value, off=rule.off):
            raise SpmdZeroConfigError(key=key, value=value, reason=rule.reason, fix=rule.fix)


def _without_curriculum(config: dict[str, Any]) -> None:
    """Removes a `data_efficiency` that orders no samples.

    Its other half, random layer token drop, is of layers that `convert_to_random_ltd` replaces.
    That call is refused; without it DeepSpeed too trains all tokens in all layers.
    """
    section = config.get("data_efficiency")
    if not isinstance(section, Mapping) or flag(section.get("enabled")) is not True:
        return
    sampling = section.get("data_sampling") or {}
    if not isinstance(sampling, Mapping) or flag(sampling.get("enabled", False)) is not False:
        return
    del config["data_efficiency"]
    if is_new("random_ltd"):
        _logger.warning(
            "data_efficiency drops no tokens: random_ltd is of layers that convert_to_random_ltd "
            "replaces, which spmdzero doesn't have. Without that call DeepSpeed drops none either"
        )


def off_names(section: str) -> set[str]:
    """The keys of a section that are only accepted while they ask for nothing."""
    keys = (key.rpartition(".") for key in (*OFF_ONLY, *REMOVED))
    return {name for parent, _, name in keys if parent == section}


def _check_removed(value: object, *, key: str, reason: str) -> None:
    # A section without "enabled" is off only if it is empty.
    section = isinstance(value, Mapping) and value
    off = flag(value.get("enabled")) is False if section else not value
    if not off:
        raise SpmdZeroConfigError(key=key, value=value, reason=reason, fix="Remove the key.")


def _check_section(value: object, *, key: str, rule: OffSection) -> None:
    if value is None or flag(value) is False:
        return
    if not isinstance(value, Mapping):
        raise SpmdZeroConfigError(key=key, value=value, reason=rule.reason, fix=rule.fix)
    for name, off in rule.off.items():
        if not _asks_nothing(value.get(name), off=off):
            raise SpmdZeroConfigError(
                key=f"{key}.{name}", value=value[name], reason=rule.reason, fix=rule.fix
            )
    known = {*rule.off, *rule.idle}
    for name, item in value.items():
        if name not in known:
            raise unknown_key(section=key, name=name, value=item, known=known)


def _asks_nothing(value: object, *, off: object) -> bool:
    if isinstance(off, tuple):
        return any(_asks_nothing(value, off=one) for one in off)
    if isinstance(off, bool):
        value = flag(value)
    if isinstance(value, str) and isinstance(off, str):
        return value.lower() == off.lower()
    # In Python True equals 1, but not in a config.
    return value is None or (isinstance(value, bool) == isinstance(off, bool) and value == off)
