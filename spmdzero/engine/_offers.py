"""Lets an engine offer the methods of its parts as its own."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

_Owner = TypeVar("_Owner", bound=type)


def offers(part: str, cls: type, names: str = "") -> Callable[[_Owner], _Owner]:
    """Makes the decorated class offer methods and attributes of one of its parts as its own.

    Signatures and docstrings are the part's. A name that the class, or an engine from which it is
    derived, already has is kept.

    Args:
        part: the attribute that holds the part, or the dotted path to it.
        cls: the part's class.
        names: names of methods and attributes, separated by spaces; by default all public ones.
    """

    def decorate(owner: _Owner) -> _Owner:
        line = owner.__mro__
        # torch's module has names that an engine has otherwise.
        engines = line[: line.index(nn.Module)] if nn.Module in line else line[:1]
        taken = {name for engine in engines for name in vars(engine)}
        for name in names.split() or [name for name in dir(cls) if not name.startswith("_")]:
            if name not in taken:
                setattr(owner, name, _offered(part, name, inspect.getattr_static(cls, name, None)))
        return owner

    return decorate


def _offered(part: str, name: str, member: Any) -> Any:
    if isinstance(member, staticmethod):
        return member
    owner = operator.attrgetter(part)
    if not inspect.isfunction(member):
        return property(
            operator.attrgetter(f"{part}.{name}"),
            lambda self, value: setattr(owner(self), name, value),
            doc=member.__doc__ if isinstance(member, property) else None,
        )

    method = operator.attrgetter(f"{part}.{name}")

    @functools.wraps(member)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self)(*args, **kwargs)

    return call
