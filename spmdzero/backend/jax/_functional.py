"""Which functional operation computes what one in place, or into `out`, writes."""

import dataclasses
import functools
from typing import Any

import torch

_aten = torch.ops.aten
# Where the name doesn't tell.
_NAMED = {
    "zero_": "zeros_like",
    "__ilshift__": "__lshift__",
    "__irshift__": "__rshift__",
    "_native_batch_norm_legit": "_native_batch_norm_legit_functional",
}


@dataclasses.dataclass(frozen=True)
class Functional:
    """A functional operation and what becomes of its results.

    Attributes:
        func: the operation.
        writes: names of the arguments that take its last results; the first ones are returned.
        outs: whether these arguments are not among those of `func`.
    """

    func: Any
    writes: tuple[str, ...]
    outs: bool


@functools.cache
def functional(func: Any) -> Functional | None:
    """The functional operation of one that writes; None where there is none."""
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
    # Of these only the first ones are asked: a functional form may take a dtype more.
    mine = [(a.name, str(a.type)) for a in arguments]
    its = [(a.name, str(a.type)) for a in kept]
    return mine[: len(its)] == its and all(
        a.has_default_value() or a.kwarg_only for a in arguments[len(its) :]
    )
