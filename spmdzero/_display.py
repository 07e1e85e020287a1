"""Finds the renderer of an object."""

from collections.abc import Callable
from functools import singledispatch
from typing import Protocol


class Page(Protocol):
    """The shown form of an object."""

    def text(self) -> str:
        """Aligned text without colour codes."""
        ...

    def html(self) -> str:
        """Self-contained HTML in the reader's own colours."""
        ...

    def document(self) -> str:
        """The HTML as a whole document."""
        ...


# What registers the functions that draw; the package hands it over as it is imported.
_load: Callable[[], object] | None = None


def draw_with(load: Callable[[], object]) -> None:
    """Has `load` called before an object is drawn: it registers functions at `page_of`."""
    global _load
    _load = load


@singledispatch
def page_of(shown: object) -> Page:
    """The page of an object; `spmdzero.show` registers a function for each `Shown` class."""
    if _load is not None:
        _load()
    found = page_of.dispatch(type(shown))
    if found is page_of.dispatch(object):
        raise NotImplementedError(f"spmdzero.show knows no {type(shown).__name__}")
    return found(shown)


class Shown:
    """Base class of objects that print as text, and that a notebook draws."""

    def __str__(self) -> str:
        return page_of(self).text()

    def _repr_html_(self) -> str:
        return page_of(self).html()
