"""Views: which operations make one, and how a write through one reaches what it views."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ViewStep:
    """One view operation.

    Attributes:
        func: the operation.
        args, kwargs: beside the tensor that it views.
        place: which of several results it is.
        before, after: the shapes.
        dtype: of what it views.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: torch.dtype


Call = Callable[..., Any]


class UnwritableViewError(Exception):
    """A write through this view isn't known here."""


def written(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    """`base` with `new` in the place that `step` views.

    Args:
        base, new: values, of the shapes `step.before` and `step.after`.
        call: computes an operation of values.

    Raises:
        UnwritableViewError: no such write is known.
    """
    name = step.func._schema.name.partition("::")[2]
    if name in _SAME:
        return new
    if name in _RESHAPES or (name == "view" and step.func._overloadname == "default"):
        return call(_aten.view.default, new, list(step.before))
    if name == "view":
        return call(_aten.view.dtype, new, step.dtype)
    if name in _WRITES:
        return _WRITES[name](step, base, new, call)
    if name == "expand" and math.prod(step.before) != math.prod(step.after):
        raise UnwritableViewError("a write into a tensor that has one element in several places")
    if name in _PLACES:
        # Where each element of the view is in what it views, as numbers that are viewed alike.
        count = math.prod(step.before)
        numbers = call(_aten.arange.default, count, dtype=torch.int64)
        numbers = call(_aten.view.default, numbers, list(step.before))
        places = call(step.func, numbers, *step.args, **step.kwargs)
        return call(_aten.put.default, base, places, new)
    raise UnwritableViewError(f"a write through aten::{name}")


_PLACES = {"unfold", "expand"}
_SAME = {"alias", "detach", "lift_fresh", "detach_"}
_RESHAPES = {"_reshape_alias", "reshape", "squeeze", "unsqueeze", "view_copy"}


def _permuted(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    (dims,) = step.args
    ndim = len(step.before)
    back = sorted(range(ndim), key=lambda i: dims[i] % ndim)
    return call(_aten.permute.default, new, back)


def _select(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    return call(_aten.select_scatter.default, base, new, *step.args)


def _slice(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    return call(_aten.slice_scatter.default, base, new, *step.args)


def _diagonal(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    return call(_aten.diagonal_scatter.default, base, new, *step.args, **step.kwargs)


def _strided(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    return call(_aten.as_strided_scatter.default, base, new, *step.args)


def _split(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    sizes, dim = step.args[0], step.args[1] if len(step.args) > 1 else 0
    assert step.place is not None
    starts = sum(sizes[: step.place]) if isinstance(sizes, list | tuple) else sizes * step.place
    end = starts + step.after[dim]
    return call(_aten.slice_scatter.default, base, new, dim, starts, end)


def _unbound(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    dim = step.args[0] if step.args else 0
    return call(_aten.select_scatter.default, base, new, dim, step.place)


_WRITES: Mapping[str, Callable[[ViewStep, Any, Any, Call], Any]] = {
    "permute": _permuted,
    "transpose": lambda s, b, new, call: call(_aten.transpose.int, new, *s.args),
    "t": lambda s, b, new, call: call(_aten.t.default, new),
    "select": _select,
    "slice": _slice,
    "diagonal": _diagonal,
    "as_strided": _strided,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbound,
    "_conj": lambda s, b, new, call: call(_aten._conj_physical.default, new),
    "_neg_view": lambda s, b, new, call: call(_aten.neg.default, new),
    "view_as_complex": lambda s, b, new, call: call(_aten.view_as_real.default, new),
    "view_as_real": lambda s, b, new, call: call(_aten.view_as_complex.default, new),
}
