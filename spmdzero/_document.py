"""Results that are kept as JSON, and written as pages."""

from functools import cache
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError
from typing_extensions import Self

from spmdzero._display import Shown, page_of
from spmdzero.errors import SpmdZeroUsageError


class Document(Shown):
    """Base class of dataclasses that are kept as JSON, and written as a page."""

    _named: ClassVar[str]
    """The object's name in an error, with its article."""

    def to_json(self) -> str:
        """The object as JSON text that `from_json` reads."""
        return _adapter(type(self)).dump_json(self, indent=2).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The object that `to_json` wrote.

        Raises:
            SpmdZeroUsageError: the text is no such JSON.
        """
        try:
            return _adapter(cls).validate_json(text)
        except ValidationError as wrong:
            raise SpmdZeroUsageError(f"not the JSON text of {cls._named}: {wrong}") from wrong

    def to_html(self) -> str:
        """The object as a self-contained HTML page, for dark and light mode."""
        return page_of(self).document()


@cache
def _adapter(of: type) -> "TypeAdapter[Any]":
    return TypeAdapter(of)
