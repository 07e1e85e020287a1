"""The plan as JSON, with a version."""

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from spmdzero.errors import SpmdZeroError

_VERSION = 1

T = TypeVar("T")


def dump(plan: object) -> str:
    """The dataclass `plan` as JSON text, with the format's version."""
    content = TypeAdapter(type(plan)).dump_python(plan, mode="json")
    return json.dumps({"version": _VERSION, "plan": content})


def load(cls: type[T], text: str) -> T:
    """The instance of `cls` that `dump` wrote.

    Raises:
        SpmdZeroError: the text is not JSON, has a different version, or is not a valid `cls`.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpmdZeroError(f"a sharding plan is not valid JSON: {error}") from error
    if not isinstance(document, dict) or "version" not in document:
        raise SpmdZeroError("this JSON is not a sharding plan: it has no version")
    if document["version"] != _VERSION:
        raise SpmdZeroError(
            f"a sharding plan of version {document['version']!r} can't be read: "
            f"this spmdzero reads version {_VERSION}"
        )
    try:
        # Strict JSON validation takes lists for tuples and refuses "2" for 2.
        return TypeAdapter(cls).validate_json(json.dumps(document.get("plan")), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the plan"
        raise SpmdZeroError(f"a sharding plan is malformed at {where}: {first['msg']}") from error
