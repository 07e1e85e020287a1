"""How an object finds its renderer."""

import importlib
from functools import singledispatch
from typing import Protocol


class Page(Protocol):
    """What is shown of an object."""

    def text(self) -> str:
        """Aligned text without colour codes."""
        ...

    def html(self) -> str:
        """HTML in the reader's own colours that needs nothing from outside."""
        ...

    def document(self) -> str:
        """The same as a whole HTML document."""
        ...


@singledispatch
def page_of(shown: object) -> Page:
    """What is shown of an object; `spmdzero.show` registers how, for each class that is `Shown`."""
    # Nobody else has to import it before something is shown.
    importlib.import_module("spmdzero.show")
    found = page_of.dispatch(type(shown))
    if found is page_of.dispatch(object):
        raise NotImplementedError(f"spmdzero.show knows no {type(shown).__name__}")
    return found(shown)


class Shown:
    """An object that prints as text, and that a notebook draws."""

    def __str__(self) -> str:
        return page_of(self).text()

    def _repr_html_(self) -> str:
        return page_of(self).html()
