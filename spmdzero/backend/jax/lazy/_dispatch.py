"""Records operations of lazy tensors, below autograd."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmdzero._dispatch_mode import composed
from spmdzero._user_line import user_line
from spmdzero.backend.forms._tree import found, mapped
from spmdzero.backend.jax.graph._lowered import made_by, require_lowering
from spmdzero.backend.jax.graph._operations import AtenOp, identity
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._cells import Cell
from spmdzero.backend.jax.lazy._decompose import decomposed, kernel_of_others, of_data
from spmdzero.backend.jax.lazy._meta import on_meta
from spmdzero.backend.jax.lazy._tensor import LazyTensor, alias_of, hooks, over, require_own_part
from spmdzero.backend.jax.lazy._values import Operation, Space, Value, record
from spmdzero.backend.jax.lazy._views import (
    ViewStep,
)
from spmdzero.backend.jax.ops import UnsupportedError
from spmdzero.backend.replica import (
    KNOWN_DRAWS,
    PRODUCTS,
    Indexing,
    gives_shape_of_data,
    has_generator,
    made_static,
    mixed_dtypes,
)
from spmdzero.errors import ReplicaRegionError, SpmdZeroRuntimeError

_aten = torch.ops.aten
# Operations that make a tensor of a host's numbers.
LIFTS = {_aten.lift_fresh.default, _aten.lift.default, _aten.lift_fresh_copy.default}
# Functions that answer an operation instead of recording it.
Special = Callable[..., Any]
_special: dict[Any, Special] = {}


def special(*funcs: Any) -> Callable[[Special], Special]:
    """Decorator of a function that answers these operations."""

    def add(function: Special) -> Special:
        _special.update(dict.fromkeys(funcs, function))
        return function

    return add


def dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answers an operation that takes lazy tensors, or makes them."""
    with Operation(func):
        return _answered(func, args, kwargs)


def _answered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _special:
        return _special[func](*args, **kwargs)
    parts = composed(func)
    if parts is not None:
        return parts(*args, **kwargs)
    if gives_shape_of_data(func, args):
        return _of_the_datas_shape(func, args, kwargs)
    if AtenOp.of(func) is None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            if has_generator(args, kwargs) and "out" not in kwargs:
                return hooks.drawn(func, args, kwargs)
            raise SpmdZeroRuntimeError(
                f"{user_line()}: {func} draws random numbers in a way that the JAX backend doesn't "
                f"know. Use {KNOWN_DRAWS}, or draw on the CPU and move the numbers"
            )
        kernel = kernel_of_others(func)
        if kernel is not None:
            made = kernel(*args, **kwargs)
            if func._schema.is_mutable and not func._schema.returns:
                # torch's kernels do it for each tensor of a list, but above the point of this call.
                torch.autograd.graph.increment_version(
                    [t for t in found(args[0], LazyTensor) if not t.is_inference()]
                )
            return made
    if func.is_view and func not in LIFTS:
        return _view(func, args, kwargs)
    if func._schema.is_mutable:
        return hooks.written(func, args, kwargs)
    return recorded(func, args, kwargs)


hooks.dispatched = dispatched


def _of_the_datas_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes an operation whose result has a shape that depends on values, which are read.

    Raises:
        ReplicaRegionError: there are no values yet, or replicas disagree.
    """
    try:
        static = made_static(
            func, args, kwargs, read=read, upload=lambda tensor: over(_host.moved(tensor))
        )
    except ReplicaRegionError as error:
        raise of_data(func) from error
    if isinstance(static, Indexing):
        return dispatched(static.func, static.args, kwargs)
    return static


def value_of(tensor: torch.Tensor) -> Value:
    """The value of `tensor`; a tensor on the host is uploaded as a constant."""
    if not isinstance(tensor, LazyTensor):
        return _host.constant(tensor)
    value = tensor.cell.value
    if tensor.cell.turned and tensor.requires_grad:
        require_own_part(tensor)
    for step in tensor.steps:
        value = viewed(step, value)
    return value


def own_value(tensor: torch.Tensor) -> Value:
    """The value of `tensor`, which has to be on the devices.

    Raises:
        SpmdZeroRuntimeError: it is on the CPU, as is a parameter that was moved off the devices.
    """
    if not isinstance(tensor, LazyTensor):
        raise SpmdZeroRuntimeError(
            f"{user_line()}: a program on the devices is given a tensor on the CPU, "
            f"{list(tensor.shape)} {tensor.dtype}. Move it to the devices first"
        )
    return value_of(tensor)


def values_of(tensors: Sequence[torch.Tensor]) -> list[Value]:
    """`value_of` each; quick for the state of a step, whose tensors are no views."""
    return _quickly(tensors, value_of)


def own_values(tensors: Sequence[torch.Tensor]) -> list[Value]:
    """`own_value` of each; quick as `values_of`."""
    return _quickly(tensors, own_value)


def _quickly(
    tensors: Sequence[torch.Tensor], value: Callable[[torch.Tensor], Value]
) -> list[Value]:
    return [
        tensor.cell.held
        if isinstance(tensor, LazyTensor) and not (tensor.steps or tensor.cell.turned)
        else value(tensor)
        for tensor in tensors
    ]


def _valuing(args: tuple[Any, ...]) -> Callable[[torch.Tensor], Value]:
    """`value_of`, which makes host tensors this host's own if another argument is."""
    if _host.traffic.place_own is None or all(
        tensor.cell.value.space is not Space.HOST for tensor in found(args, LazyTensor)
    ):
        return value_of
    return lambda tensor: value_of(tensor) if isinstance(tensor, LazyTensor) else _host.own(tensor)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a tensor on the CPU, after the devices have computed it.

    In a region it is the value that all replicas share.
    """
    if not isinstance(tensor, LazyTensor):
        return tensor
    watched = _host.traffic.watch(tensor)
    return fetch(tensor) if watched is None else watched


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """The global value of a tensor on the CPU."""
    return _host.fetched(value_of(tensor))


def viewed(step: ViewStep, value: Value) -> Value:
    """The value of a view of `value`."""
    if step.before == step.after and step.func in _ALIASES:
        return value
    results = compute(step.func, value, *step.args, **step.kwargs)
    return results if step.place is None else results[step.place]


_ALIASES = {_aten.alias.default, _aten.detach.default}


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Records an operation of values, and returns its results."""
    given = _map(args, kwargs, Value, over)
    op = AtenOp.of(func)
    if op is None:
        made = decomposed(func, *given)
        return list(map(value_of, made)) if isinstance(made, list | tuple) else value_of(made)
    made = meta_result(func, *given)
    metas = made if isinstance(made, list | tuple) else [made]
    outputs = _noted(op, args, kwargs, metas)
    return list(outputs) if isinstance(made, list | tuple) else outputs[0]


def _noted(op: AtenOp, args: Any, kwargs: Any, metas: Sequence[Any]) -> tuple[Value, ...]:
    forms = [(tuple(meta.shape), meta.dtype) for meta in metas]
    require_lowering(op, args, kwargs, forms)
    return record(op, args, kwargs, forms)


def recorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records an operation of lazy tensors, and returns its pending results."""
    op = AtenOp.of(func)
    if op is None:
        valuing = _valuing(args)

        def here(tensor: torch.Tensor) -> torch.Tensor:
            # A loss's labels may be on the CPU; Python's calls would refuse them beside lazy
            # tensors.
            there = not isinstance(tensor, LazyTensor) and tensor.dim() and not tensor.is_meta
            return over(valuing(tensor)) if there else tensor

        args, kwargs = _map(args, kwargs, torch.Tensor, here)
        return _apart(func, decomposed(func, args, kwargs), args)
    mixed = mixed_dtypes(func, args) if func in PRODUCTS else None
    if mixed is not None:
        raise SpmdZeroRuntimeError(f"{user_line()}: {mixed}")
    made = meta_result(func, args, kwargs)
    metas = made if isinstance(made, list | tuple) else [made]
    place = _mask_place(func)
    if place is not None:
        # Some of torch's meta kernels return gradients that weren't asked for, others don't.
        asked = args[place] if place < len(args) else kwargs["output_mask"]
        metas = [m if wanted else None for m, wanted in zip(metas, asked, strict=True)]
    present = [m for m in metas if isinstance(m, torch.Tensor)]
    values = _map(args, kwargs, torch.Tensor, _valuing(args))
    outputs = iter(_noted(op, *values, present))
    results = [over(next(outputs), m) if isinstance(m, torch.Tensor) else m for m in metas]
    return type(made)(results) if isinstance(made, list | tuple) else results[0]


def _apart(func: Any, made: Any, args: Any) -> Any:
    """The result of torch's decomposition, cloned where the operation must not return its inputs.

    Some decompositions return an input, as a dropout that drops nothing does.
    """
    if any(result.alias_info for result in func._schema.returns):
        return made
    cells = {id(tensor.cell) for tensor in found(args, LazyTensor)}
    if not any(id(tensor.cell) in cells for tensor in found(made, LazyTensor)):
        return made
    return mapped(made, LazyTensor, lambda t: t.clone() if id(t.cell) in cells else t)


@functools.cache
def _mask_place(func: Any) -> int | None:
    """Index of the argument that says which gradients to return; None if there is none."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


def meta_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation's result on the meta device, which must not be written.

    Raises:
        ReplicaRegionError: the result's shape depends on values.
    """
    try:
        return on_meta(func, args, kwargs)
    except NotImplementedError as error:
        op = AtenOp.of(func)
        if op is not None:
            # Where torch has no meta kernel of an operation, JAX may know the shapes.
            with contextlib.suppress(UnsupportedError):
                made = made_by(op, *_map(args, kwargs, torch.Tensor, value_of))
                return made if len(func._schema.returns) > 1 else made[0]
        raise of_data(func) from error


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not isinstance(source, LazyTensor):
        return recorded(func, args, kwargs)
    made, offset = meta_result(func, args, kwargs), int(source.storage_offset())
    if func in _ALIASES:
        return alias_of(source, source.steps, made, offset)
    several = isinstance(made, list | tuple)
    results = []
    for place, meta in enumerate(made if several else [made]):
        step = ViewStep(
            func, args[1:], kwargs, place if several else None,
            tuple(source.shape), tuple(meta.shape), source.dtype,
        )  # fmt: skip
        results.append(alias_of(source, (*source.steps, step), meta, offset))
    return type(made)(results) if several else results[0]


def _map(args: Any, kwargs: Any, kind: type, function: Callable[[Any], Any]) -> tuple[Any, Any]:
    return mapped(tuple(args), kind, function), mapped(dict(kwargs), kind, function)


def copied(value: Value) -> Value:
    """A copy of the value, so that the original can be donated."""
    return record(identity, (value,), {}, [(value.shape, value.dtype)])[0]


def replace(tensor: LazyTensor, value: Value) -> None:
    """Makes `tensor` alone hold `value`, which has the same shape and dtype."""
    tensor.cell, tensor.steps = tensor.cell.succeeded_by(Cell(value, tensor.stride())), ()
