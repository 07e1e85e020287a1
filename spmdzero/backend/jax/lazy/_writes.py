"""Writes in place, into `out` and through views."""

from collections.abc import Sequence
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend.forms._tree import found
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._cells import Cell
from spmdzero.backend.jax.lazy._dispatch import compute, dispatched, read, value_of, viewed
from spmdzero.backend.jax.lazy._functional import functional
from spmdzero.backend.jax.lazy._meta import on_meta
from spmdzero.backend.jax.lazy._tensor import LazyTensor, become, hooks, require_own_part
from spmdzero.backend.jax.lazy._values import Value
from spmdzero.backend.jax.lazy._views import (
    UnwritableViewError,
    ViewStep,
    shows_twice,
    written,
    written_by_places,
)
from spmdzero.errors import SpmdZeroRuntimeError

_aten = torch.ops.aten


def write(tensor: torch.Tensor, value: Value) -> None:
    """Makes `tensor`, and its base if it is a view, hold `value`."""
    if not isinstance(tensor, LazyTensor):
        raise SpmdZeroRuntimeError(
            f"{user_line()}: a value on the devices is written into a tensor on the CPU. Move it "
            "first: tensor.cpu()"
        )
    cell, held, steps = tensor.cell, tensor.cell.held, tensor.steps
    # A tensor that is no view has those of its value; asking torch would cost time at each step.
    shape, dtype = (tuple(tensor.shape), tensor.dtype) if steps else (held.shape, held.dtype)
    if value.shape != shape or value.dtype is not dtype:
        value = compute(_aten.expand.default, _cast(value, dtype), list(shape))
    cell.value = _with(steps, held, value) if steps else value


def _with(steps: tuple[ViewStep, ...], held: Value, value: Value) -> Value:
    """`held` with `value` in the place that the steps show."""
    values = [held]
    for step in steps[:-1]:
        values.append(viewed(step, values[-1]))
    first = next((place for place, step in enumerate(steps) if shows_twice(step)), len(steps))
    try:
        if first < len(steps):
            value = written_by_places(steps[first:], values[first], value, compute)
        for step, base in zip(reversed(steps[:first]), reversed(values[:first]), strict=True):
            value = written(step, base, value, compute)
    except UnwritableViewError as error:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: {error} is not known to the JAX backend. Write into a clone"
        ) from None
    return value


def _cast(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else compute(_aten._to_copy.default, value, dtype=dtype)


def answered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answers an operation that writes, in place or into `out`."""
    schema = func._schema
    if schema.name == "aten::copy_":
        if not isinstance(args[0], LazyTensor):
            return args[0].copy_(read(args[1]))
        _require_part(args)
        _as_torch_takes_it(func, args, kwargs)
        _require_places(func, args)
        moves = not (isinstance(args[1], LazyTensor) or args[0].cell.same)
        write(args[0], _host.moved(args[1]) if moves else value_of(args[1]))
        return args[0]
    form = functional(func)
    if form is None:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: {func} writes in place and is not known to the JAX backend. Use its "
            "functional form"
        )
    if torch.Tag.inplace_view in func.tags:
        if args[0].requires_grad and args[0]._is_view():
            raise SpmdZeroRuntimeError(
                f"{user_line()}: {func} gives a view of what is trained another shape in place, "
                f"of which autograd knows the old one only. Use {form.func}"
            )
        become(args[0], dispatched(form.func, args, kwargs))
        return args[0]
    metas = _as_torch_takes_it(func, args, kwargs)
    _require_places(func, args)
    _require_part(args)
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    targets = [given[name] for name in form.writes]
    if form.outs:
        kwargs = {name: value for name, value in kwargs.items() if name not in form.writes}
        args = tuple(args[: sum(not a.is_out for a in schema.arguments)])
    made = dispatched(form.func, args, kwargs)
    results = list(made) if isinstance(made, list | tuple) else [made]
    for place, (target, result) in enumerate(zip(targets, results[-len(targets) :], strict=True)):
        if target is not None:
            _require_cast(result.dtype, target.dtype)
            if form.outs and metas is not None:
                _resize(target, metas[place])
            write(target, value_of(result))
    if form.outs or len(results) == len(targets):
        return targets[0] if len(schema.returns) == 1 else tuple(targets)
    kept = results[: len(results) - len(targets)]
    return tuple(kept) if len(kept) > 1 else kept[0]


def _require_part(args: tuple[Any, ...]) -> None:
    """Calls `require_own_part` for a written tensor through which a gradient goes."""
    target = args[0] if args else None
    if not isinstance(target, LazyTensor) or not target.cell.turned:
        return
    if any(tensor.requires_grad for tensor in found(args, torch.Tensor)):
        require_own_part(target)


# Operations that write the same value to all places of an element.
_ALIKE = {"aten::fill_", "aten::zero_"}


def _require_places(func: Any, args: tuple[Any, ...]) -> None:
    """Refuses a write into a tensor that shows an element several times, as torch does."""
    if not args or not isinstance(args[0], LazyTensor) or func._schema.name in _ALIKE:
        return
    shape, stride = args[0].shape, args[0].stride()
    if any(n > 1 and not step for n, step in zip(shape, stride, strict=True)):
        raise SpmdZeroRuntimeError(
            f"{user_line()}: {func} writes into a tensor that shows one element in several places, "
            "as an expanded one. Write into a clone"
        )


def _as_torch_takes_it(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any] | None:
    """The result of an operation that writes, on the meta device; None where torch doesn't know.

    Raises:
        RuntimeError: torch refuses it, for example if the written tensor's dtype can't hold it.
    """
    try:
        made = on_meta(func, args, kwargs)
    except NotImplementedError:
        return None
    return made if isinstance(made, list | tuple) else [made]


def _require_cast(dtype: torch.dtype, wanted: torch.dtype) -> None:
    # Some of torch's meta kernels don't check this.
    if not torch.can_cast(dtype, wanted):
        raise RuntimeError(
            f"{user_line()}: result type {dtype} can't be cast to the desired output type {wanted}"
        )


def _resize(target: torch.Tensor, meta: torch.Tensor) -> None:
    """Gives an `out` tensor the shape of its result, as torch does."""
    if target.shape == meta.shape or not isinstance(target, LazyTensor):
        return
    if target.numel() or target.steps:
        raise RuntimeError(
            f"{user_line()}: out= is a tensor of shape {list(target.shape)} and the result has "
            f"{list(meta.shape)}. Give an empty one, torch.empty(0), or one of that shape"
        )
    like = torch.empty_strided(meta.shape, meta.stride(), dtype=target.dtype, device="meta")
    value = compute(_aten.empty.memory_format, list(meta.shape), dtype=target.dtype)
    become(target, LazyTensor(target.cell.succeeded_by(Cell(value, meta.stride())), (), like))


hooks.written = answered
