"""Sorts all keys of a config into honoured, ignored and refused ones, without a device."""

import contextlib
import copy
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdzero.config._auto import resolve_auto, with_stand_ins
from spmdzero.config._combinations import check_combinations
from spmdzero.config._contexts import FP16_WITHOUT_ZERO, without_effect_beside
from spmdzero.config._deprecated import holder_of, modernise
from spmdzero.config._errors import parse
from spmdzero.config._ignored import ignore_unknown, ignored, known_names
from spmdzero.config._keys import NO_MEANING, REMOVED
from spmdzero.config._models import SECTIONS, SpmdZeroConfig
from spmdzero.config._must_be_off import OFF_ONLY, OffSection, OffValue
from spmdzero.config._optimizers import REFUSED_OPTIMIZERS, optimizer_params
from spmdzero.config._params import check_params
from spmdzero.config._read import named_by, one_of, read
from spmdzero.config._schedules import schedule_params
from spmdzero.config._screen import screen
from spmdzero.errors import SpmdZeroConfigError

# Largest depth: more than any real config has, and far from Python's recursion limit.
_MAX_DEPTH = 50
# Largest integer: Python refuses to print more than 4300 digits, and no setting is that large.
_MAX_BITS = 2048


def check_values(config: dict[str, Any]) -> None:
    """Returns if the config is made of JSON values (tuples count as lists).

    Raises:
        SpmdZeroConfigError: a key is not a string, a value is no JSON value, an integer has more
            than 2048 bits, or the config is nested more than 50 deep, for example because it
            contains itself.
    """
    pending: list[tuple[str, Any, int]] = [("", config, 0)]
    while pending:
        path, value, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise _refused(path, type(value), reason=f"this is nested more than {_MAX_DEPTH} deep")
        if isinstance(value, dict):
            for name, item in value.items():
                if not isinstance(name, str):
                    raise _refused(path, name, reason="a key is not a string", fix="Use strings.")
                pending.append((f"{path}.{name}".lstrip("."), item, depth + 1))
        elif isinstance(value, list | tuple):
            pending.extend((path, item, depth + 1) for item in value)
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise _refused(
                path, f"{value.bit_length()} bits", reason="no setting is as large as this number"
            )
        elif not isinstance(value, str | int | float | None):
            raise _refused(
                path,
                value,
                reason=f"{type(value).__name__} is not a JSON value",
                fix="Write null, a boolean, a number, a string, a list or an object.",
            )


def _refused(
    path: str, value: object, *, reason: str, fix: str = "Correct this value."
) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(key=path or "config", value=value, reason=reason, fix=fix)


def load_config(
    config: str | os.PathLike[str] | dict[str, Any] | None, *, args: object = None
) -> SpmdZeroConfig:
    """Reads and checks a config.

    Args:
        config: path of a JSON or Hjson file, the base64 encoding of its text, or its content as
            a dict, which is not changed; None takes ``args.deepspeed_config``.
        args: the parsed command line, for example an argparse.Namespace.

    Raises:
        SpmdZeroConfigError: there is no config or more than one, the file can't be read, or a key
            can't be honoured. A key that DeepSpeed doesn't know and so ignores is ignored too, and
            logged.
    """
    given = read(one_of(config, named_by(args)))
    check_values(given)
    source, raw = copy.deepcopy(given), copy.deepcopy(given)
    modernise(raw)
    ignore_unknown(raw)
    modern = copy.deepcopy(raw)
    resolve_auto(raw)
    screen(raw)
    known = {at: known_names(at) for at in SECTIONS}
    checked = parse(SpmdZeroConfig, raw, known=known, at="")
    if chosen := checked.optimizer:
        check_params(optimizer_params(chosen.type), chosen.params, at="optimizer.params")
    if scheduled := checked.scheduler:
        check_params(schedule_params(scheduled.type), scheduled.params, at="scheduler.params")
    check_combinations(checked)
    checked._source = source
    checked._no_meaning = {
        key: why
        for key, why in (NO_MEANING | without_effect_beside(checked)).items()
        if holder_of(modern, key)[0] is not None
    }
    return checked


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
