"""Finds the renderer of an object."""

import importlib
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


@singledispatch
def page_of(shown: object) -> Page:
    """The page of an object; `spmdzero.show` registers a function for each `Shown` class."""
    # Imported here, so that no other code has to import it.
    importlib.import_module("spmdzero.show")
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
