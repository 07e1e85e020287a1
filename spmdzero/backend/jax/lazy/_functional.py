"""Functional forms of operations that write in place or into `out`."""

import dataclasses
import functools
from typing import Any

import torch

_aten = torch.ops.aten
# Names of functional forms that don't follow from the operation's name.
_NAMED = {
    "zero_": "zeros_like",
    "__ilshift__": "__lshift__",
    "__irshift__": "__rshift__",
    "_native_batch_norm_legit": "_native_batch_norm_legit_functional",
}


@dataclasses.dataclass(frozen=True)
class Functional:
    """A functional operation, and the arguments that its results are written to.

    Attributes:
        func: the functional operation.
        writes: names of the arguments that take its last results; the first results are returned.
        outs: whether these arguments don't belong to those of `func`.
    """

    func: Any
    writes: tuple[str, ...]
    outs: bool


@functools.cache
def functional(func: Any) -> Functional | None:
    """The functional form of an operation that writes; None if there is none."""
    schema = func._schema
    written = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    outs = any(a.is_out for a in schema.arguments)
    kept = [a for a in schema.arguments if not a.is_out]
    name = schema.name.partition("::")[2]
    for candidate in _candidates(name):
        packet = getattr(_aten, candidate, None)
        if packet is None:
            continue
        for overload in sorted(packet.overloads(), key=lambda o: o != func._overloadname):
            found = getattr(packet, overload)
            if _takes(found._schema, kept, exact=candidate not in _NAMED.values()):
                return Functional(found, written, outs)
    return None


def _candidates(name: str) -> list[str]:
    if name in _NAMED:
        return [_NAMED[name]]
    return [name[:-1], name] if name.endswith("_") else [name]


def _takes(schema: Any, kept: list[Any], *, exact: bool) -> bool:
    if any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
        return False
    arguments = list(schema.arguments)
    if not exact:
        arguments = arguments[: len(kept)]
    # Compare only the first arguments: a functional form may also take a dtype.
    mine = [(a.name, str(a.type)) for a in arguments]
    its = [(a.name, str(a.type)) for a in kept]
    return mine[: len(its)] == its and all(
        a.has_default_value() or a.kwarg_only for a in arguments[len(its) :]
    )
