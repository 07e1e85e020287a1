"""Sorts all keys of a config into honoured, ignored and refused ones, without a device."""

import contextlib
import copy
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdzero.config._auto import with_stand_ins
from spmdzero.config._contexts import FP16_WITHOUT_ZERO
from spmdzero.config._deprecated import holder_of, modernise
from spmdzero.config._ignored import ignored
from spmdzero.config._keys import NO_MEANING, REMOVED
from spmdzero.config._load import load_config
from spmdzero.config._models import SECTIONS, SpmdZeroConfig
from spmdzero.config._must_be_off import OFF_ONLY, OffSection, OffValue
from spmdzero.config._optimizers import REFUSED_OPTIMIZERS
from spmdzero.config._read import read
from spmdzero.errors import SpmdZeroConfigError

_STAGE = "zero_optimization.stage"
_ROWS = ("train_batch_size", "train_micro_batch_size_per_gpu")
# Sections that hold parameters of an optimizer or a schedule, and so have no fixed keys.
_PARAMS = ("optimizer.params", "scheduler.params")


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A key that `spmdzero.initialize` raises for.

    Attributes:
        key: dotted path of the key.
        value: the config's value of the key.
        reason: why it can't be honoured.
        fix: the nearest thing that works.
        line: the key and value to write instead; "" if there is more than one way.
    """

    key: str
    value: Any
    reason: str
    fix: str
    line: str


@dataclass(frozen=True, kw_only=True)
class ConfigReport:
    """The keys of a config, by their treatment.

    Attributes:
        refused: keys that `spmdzero.initialize` raises for.
        without_effect: dotted path of a key that has no effect -> why.
        auto: dotted path of a key that is "auto" -> its value, unless a client writes one.
        honoured: dotted path -> value.
        unchecked: dotted path of a parameter of an optimizer or a schedule that is refused, whose
            replacement isn't known -> value.
        notes: warnings that the log of a run would have.
    """

    refused: tuple[Refused, ...]
    without_effect: dict[str, str]
    auto: dict[str, str]
    honoured: dict[str, Any]
    unchecked: dict[str, Any]
    notes: tuple[str, ...]


def check_config(config: str | os.PathLike[str] | dict[str, Any]) -> ConfigReport:
    """Reports how `load_config` treats each key; a client writes the number for an "auto".

    Conditions on the number of devices, or on the model, aren't checked.

    Args:
        config: path of a JSON or Hjson file, the base64 encoding of its text, or its content.

    Raises:
        SpmdZeroConfigError: the config can't be read.
    """
    given = read(config)
    modern = copy.deepcopy(given)
    with _said() as notes:
        search = _Search(*with_stand_ins(given))
        refused = tuple(search.refused())
        _modernised(modern)
        _, read_as = with_stand_ins(modern)
    idle = search.checked.no_meaning if search.checked is not None else {}
    without_effect, auto, honoured, unchecked = dict[str, str](), {}, {}, {}
    for key, value in _leaves(modern):
        if any(f"{key}.".startswith(f"{r.key}.") or r.key.startswith(f"{key}.") for r in refused):
            continue
        if why := NO_MEANING.get(key) or idle.get(key) or _why_nothing(key, notes):
            without_effect[key] = why
        elif key in read_as:
            auto[key] = read_as[key]
        elif key.rpartition(".")[0] in search.unchecked:
            unchecked[key] = value
        else:
            honoured[key] = value
    return ConfigReport(
        refused=refused,
        without_effect=without_effect,
        auto=auto,
        honoured=honoured,
        unchecked=unchecked,
        notes=(*notes, *_notes(search)),
    )


def _notes(search: "_Search") -> Iterator[str]:
    """Lists what a run would say, or need, besides."""
    checked = search.checked
    if checked is None:
        return
    if checked.fp16.enabled and not checked.zero_optimization.stage:
        yield FP16_WITHOUT_ZERO
    if not search.auto.keys() & {*_ROWS} and not {*_ROWS} & search.config.keys():
        # Any number of devices is fine: the question is only whether a batch size is given.
        yield (
            "no train_batch_size and no train_micro_batch_size_per_gpu: Lightning and accelerate "
            'give one, and transformers\' Trainer writes it where the JSON has "auto"; '
            "spmdzero.initialize needs one"
        )


@dataclass
class _Search:
    """Finds refused keys one after the other, removing each so that the next one shows."""

    config: dict[str, Any]
    auto: dict[str, str]
    checked: SpmdZeroConfig | None = None
    unchecked: set[str] = field(default_factory=set)
    _out: set[str] = field(default_factory=set)

    def refused(self) -> Iterator[Refused]:
        """Yields all refused keys; `config` has none afterwards, and `checked` is read from it."""
        while (error := self._next()) is not None:
            # A key that is missing because it was removed here is no error of the user's.
            if error.key not in self._out:
                yield Refused(
                    key=error.key, value=error.value, reason=error.reason, fix=error.fix,
                    line=_line(error.key),
                )  # fmt: skip
            if not self._take_out(error.key):
                return

    def _next(self) -> SpmdZeroConfigError | None:
        try:
            self.checked = load_config(self.config)
        except SpmdZeroConfigError as error:
            return error
        return None

    def _take_out(self, key: str) -> bool:
        """Removes the key, or the innermost section around it; returns whether it was found."""
        if holder_of(self.config, key)[0] is None:
            # The error has the key's present name, and the file may have an older one.
            _modernised(self.config)
        self._out.add(key)
        if key == "optimizer.type" and self._put_in_place(key):
            return True
        if key in ("optimizer.type", "scheduler.type"):
            self.unchecked.add(key.replace("type", "params"))
        while key:
            holder, name = holder_of(self.config, key)
            if holder is not None:
                del holder[name]
                if key == _STAGE:
                    # Without ZeRO, valid keys would be refused.
                    holder[name] = 2
                return True
            key = key.rpartition(".")[0]
        return False

    def _put_in_place(self, key: str) -> bool:
        """Writes the optimizer that a refusal advises, so that its parameters are checked."""
        holder, name = holder_of(self.config, key)
        refusal = REFUSED_OPTIMIZERS.get(str(holder[name]).lower()) if holder is not None else None
        if holder is None or refusal is None:
            return False
        holder[name] = refusal.instead
        return True


def _modernised(config: dict[str, Any]) -> None:
    # `load_config` raises the same errors.
    with contextlib.suppress(SpmdZeroConfigError):
        modernise(config)


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """Collects the warnings of spmdzero's log inside the context, each once, without printing."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and text not in said:
            said.append(text)
        return False

    logger = logging.getLogger("spmdzero")
    logger.addFilter(keep)
    try:
        yield said
    finally:
        logger.removeFilter(keep)


def _leaves(section: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted path and value of each key that is no section."""
    for name, value in section.items():
        key = f"{at}.{name}".lstrip(".")
        if isinstance(value, Mapping) and value and (key in SECTIONS or key in _PARAMS):
            yield from _leaves(value, key)
        else:
            yield key, value


def _why_nothing(key: str, notes: list[str]) -> str:
    """Why a key that isn't refused has no effect, "" if it has one.

    A note that says the same of it is taken out of `notes`.
    """
    section, _, name = key.rpartition(".")
    if key.partition(".")[0] == "data_efficiency":
        return "it drops no tokens of layers that convert_to_random_ltd doesn't replace"
    if key in OFF_ONLY or key in REMOVED:
        return "it asks for nothing"
    if section in _PARAMS or name in SECTIONS[section].json_keys():
        return ""
    said = ignored(key)
    hints = [note for note in notes if note.startswith(said)]
    for note in hints:
        notes.remove(note)
    hint = "".join(note.removeprefix(said) for note in hints)
    return f"DeepSpeed doesn't know this key and ignores it{hint}"


def _line(key: str) -> str:
    if key == _STAGE:
        return '"stage": 2'
    section, _, name = key.rpartition(".")
    rule = OFF_ONLY.get(key) or OFF_ONLY.get(section)
    if isinstance(rule, OffSection) and key not in OFF_ONLY and name not in rule.off:
        # An unknown key of a section that is off.
        return ""
    value = _off(rule) if rule is not None else None
    at = key if key in OFF_ONLY else section
    return "" if value is None else f"{json.dumps(at.rpartition('.')[2])}: {json.dumps(value)}"


def _off(rule: OffValue | OffSection) -> Any:
    """A value that asks for nothing; None if the key has to be removed."""

    def first(off: Any) -> Any:
        return off[0] if isinstance(off, tuple) else off

    if isinstance(rule, OffSection):
        return {name: first(value) for name, value in rule.off.items()}
    return first(rule.off)
