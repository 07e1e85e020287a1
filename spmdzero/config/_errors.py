"""Turns the faults of a config into one `SpmdZeroConfigError`."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from spmdzero._names import did_you_mean
from spmdzero.config._types import Section
from spmdzero.errors import SpmdZeroConfigError

_Model = TypeVar("_Model", bound=Section)

_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
# More keys in a row than that help nobody to find one.
_MOST_LISTED = 12


class RefusedValueError(ValueError):
    """Raised by a validator that knows the reason and the fix but not the key.

    Attributes:
        reason: why the value can't be honoured.
        fix: a sentence that says what works instead.
        at: the path of the faulty key below the validated object; empty for the object itself.
    """

    def __init__(self, reason: str, *, fix: str, at: tuple[str, ...] = ()) -> None:
        self.reason, self.fix, self.at = reason, fix, at
        super().__init__(reason)


def unknown_key(
    *, section: str, name: str, value: object, known: Iterable[str]
) -> SpmdZeroConfigError:
    """An error for a key that its section doesn't have, with the nearest name or all names.

    Args:
        section: dotted path of the section; empty for the top level.
        name: the unknown key.
        value: the config's value of the key.
        known: the names that the section has.
    """
    known = sorted(known)
    few = f"The known keys are: {', '.join(known)}."
    many = f"It has {len(known)} keys, which docs/config.md lists."
    fix = did_you_mean(name, known) or (few if len(known) <= _MOST_LISTED else many)
    return SpmdZeroConfigError(
        key=_dotted(section, name),
        value=value,
        reason=f"{section or 'the top level'} has no key {name!r}",
        fix=fix,
    )


def parse(
    model: type[_Model], raw: Mapping[str, Any], *, known: Mapping[str, Iterable[str]], at: str
) -> _Model:
    """Validates `raw` as an instance of `model`.

    Args:
        model: a section, or the parameters of an optimizer or a schedule.
        raw: the object to validate.
        known: the names that each section has, by the section's path below ``raw``.
        at: dotted path of ``raw`` in the user's config; empty for the whole config.

    Raises:
        SpmdZeroConfigError: about an unknown key, if there is one, else pydantic's first error.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _first_error(error, raw=raw, known=known, at=at) from None


def _first_error(
    error: ValidationError,
    *,
    raw: Mapping[str, object],
    known: Mapping[str, Iterable[str]],
    at: str,
) -> SpmdZeroConfigError:
    entries = error.errors(include_url=False)
    # A misspelt required key is both unknown and missing; only the first error tells what to do.
    entry = next((entry for entry in entries if entry["type"] == "extra_forbidden"), entries[0])
    location = tuple(str(part) for part in entry["loc"])
    cause = entry.get("ctx", {}).get("error")
    if isinstance(cause, RefusedValueError):
        location += cause.at
    key = _dotted(at, *location)
    value = _look_up(raw, location)
    kind, message = entry["type"], entry["msg"]

    if isinstance(cause, RefusedValueError):
        return SpmdZeroConfigError(key=key, value=value, reason=cause.reason, fix=cause.fix)
    if kind == "extra_forbidden":
        *section, name = location
        # An entry of a list has the names of all of them.
        names = known[_dotted(*(part for part in section if not part.isdigit()))]
        return unknown_key(section=_dotted(at, *section), name=name, value=value, known=names)
    if kind == "missing":
        return SpmdZeroConfigError(
            key=key,
            value=None,
            reason="this key is required",
            fix=f"Add it to {_dotted(at, *location[:-1])}.",
        )
    condition = message.removeprefix("Input should be ")
    expected = _EXPECTED.get(kind, condition)
    return SpmdZeroConfigError(
        key=key,
        value=value,
        reason=f"this is not {expected}",
        fix=f"Write {_EXPECTED.get(kind, f'a value that is {condition}')}.",
    )


def _dotted(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _look_up(raw: object, location: tuple[str, ...]) -> object:
    for part in location:
        if isinstance(raw, Mapping):
            raw = raw.get(part)
        elif isinstance(raw, list) and part.isdigit():
            raw = raw[int(part)]
    return raw
