"""View operations, and how a write through a view reaches its base."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ViewStep:
    """One view operation.

    Attributes:
        func: the operation.
        args, kwargs: its arguments beside the tensor.
        place: index among several results, None for one.
        before, after: the shapes.
        dtype: of the tensor that it views.
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
    """A write through this view is not supported."""


def written(step: ViewStep, base: Any, new: Any, call: Call) -> Any:
    """`base` with `new` in the place that `step` shows.

    Args:
        base, new: values, of the shapes `step.before` and `step.after`.
        call: computes an operation of values.

    Raises:
        UnwritableViewError: a write through this view is not supported.
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
    if name in ("unfold", "expand"):
        return written_by_places([step], base, new, call)
    raise UnwritableViewError(f"a write through aten::{name}")


def shows_twice(step: ViewStep) -> bool:
    """Whether the view shows an element several times, of which later steps may choose."""
    if step.func is _aten.unfold.default:
        size, stride = step.args[1:]
        return size > stride
    return step.func is _aten.expand.default and math.prod(step.before) != math.prod(step.after)


def written_by_places(steps: Sequence[ViewStep], base: Any, new: Any, call: Call) -> Any:
    """`base` with `new` in the place that `steps` show one after the other.

    Raises:
        UnwritableViewError: a step shows other values than the elements of its base.
    """
    # Number the elements of the base, and view the numbers alike: this gives each element's place.
    before = list(steps[0].before)
    places = call(_aten.arange.default, math.prod(before), dtype=torch.int64)
    places = call(_aten.view.default, places, before)
    for step in steps:
        if step.func in _OTHER_VALUES:
            raise UnwritableViewError(f"a write through {step.func} of a view")
        made = call(step.func, places, *step.args, **step.kwargs)
        places = made if step.place is None else made[step.place]
    return call(_aten.put.default, base, places, new)


_OTHER_VALUES = {
    _aten.view.dtype, _aten._conj.default, _aten._neg_view.default, _aten.view_as_real.default,
    _aten.view_as_complex.default,
}  # fmt: skip


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
