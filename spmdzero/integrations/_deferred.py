"""Tensors for code that assumes the CPU; their values stay on the devices until they are read.

accelerate's device is the CPU here, because the engine uploads each device its rows. The engine's
outputs are on the devices, and moving them at once would wait for the step. So a `DeferredTensor`
reports the CPU as its device, and its value moves when code reads it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from spmdzero._dispatch_mode import composed
from spmdzero.backend import arrays, map_tensors, runtime
from spmdzero.backend.forms._masks import by_places
from spmdzero.errors import SpmdZeroUsageError

_aten = torch.ops.aten
# Methods that need numbers in the host's memory, and that a dispatch doesn't see, or not always:
# `torch.tensor([loss])` takes the number of each element past any dispatch.
_READS: frozenset[Any] = frozenset(
    (
        torch.Tensor.__array__,
        torch.Tensor.__bool__,
        torch.Tensor.__complex__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__int__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__repr__,
        torch.Tensor.data_ptr,
        torch.Tensor.item,
        torch.Tensor.numpy,
        torch.Tensor.storage,
        torch.Tensor.tolist,
        torch.Tensor.untyped_storage,
    )
)
# Methods that would write into, or share, memory that such a tensor doesn't have.
_REFUSED: dict[Any, str] = {
    torch.Tensor.data.__set__: "assigning to .data",  # pyrefly: ignore[missing-attribute]
    torch.Tensor.apply_: "apply_",
    torch.Tensor.map_: "map_",
    torch.Tensor.share_memory_: "share_memory_",
}


class DeferredTensor(torch.Tensor):
    """A tensor on the devices that reports the CPU as its device.

    Args:
        value: the tensor on the devices, without a gradient.
        computes: whether operations run on the devices, and give deferred tensors; a tensor on the
            CPU that takes part is uploaded. If False, the first operation reads the value, and this
            and all later operations run on the CPU, for outputs that are evaluated there anyway.

    A read (`item`, `cpu`, `numpy`, `print`, a collective over processes, a write into a tensor on
    the CPU) waits for the devices. Shape, dtype and gradients are those of `value`.
    """

    _value: torch.Tensor
    _computes: bool

    @staticmethod
    def __new__(cls, value: torch.Tensor, *, computes: bool) -> "DeferredTensor":
        """A tensor without memory of its own."""
        made = torch.Tensor._make_wrapper_subclass(  # pyrefly: ignore[missing-attribute]
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=torch.device("cpu")
        )
        made._value, made._computes = value, computes
        return made

    def __init__(self, value: torch.Tensor, *, computes: bool) -> None:
        """Does nothing: `__new__` has set everything."""

    def __format__(self, format_spec: str) -> str:
        """Formats the value like a number or a tensor on the CPU, in f-strings."""
        # The region replaces torch's own method once an engine is made, see `watch_text`.
        return format(self.read(), format_spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Reads the value for methods that need memory; `__torch_dispatch__` does the rest."""
        kwargs = kwargs or {}
        if func in _REFUSED and isinstance(args[0], cls):
            raise SpmdZeroUsageError(
                f"{_REFUSED[func]}: the value of this tensor is on the devices. Write into it by "
                "tensor.copy_(...), or take one with memory of its own: tensor.cpu()"
            )
        if func is torch.Tensor.cpu:
            return _Reading.apply(args[0])
        if func in _READS:
            args, kwargs = _read((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation on the devices, or on the CPU if it reads a value."""
        kwargs = kwargs or {}
        parts = composed(func)
        if parts is not None:
            return parts(*args, **kwargs)
        if func.namespace != "aten":
            # A collective over processes, which may write into any of its tensors.
            return _on_host(func, args, kwargs, written=_tensors((args, kwargs)))
        # No compiled program knows how many a mask chooses: the host reads it, and passes indices.
        func, args = by_places(func, args, _places)
        written = _written(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            _refuse_new_shape(func)
        if _reads(func, args, kwargs) or not all(isinstance(t, cls) for t in written):
            return _on_host(func, args, kwargs, written=written)
        with _views_alias():
            result = func(*_on_devices(args), **_on_devices(kwargs, device=True))
        # A tensor that is written in place is returned as itself.
        known = {id(t._value): t for t in written if isinstance(t, cls)}
        _refuse_new_shapes(func, known.values())

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            own = known.get(id(tensor))
            return cls(tensor, computes=True) if own is None else own

        return tree_map_only(torch.Tensor, wrap, result)

    def read(self) -> torch.Tensor:
        """The value on the CPU; waits for the devices."""
        if self._computes:
            return arrays.read(self._value)
        # From now on the value is a tensor on the CPU, and keeps what is written into it.
        if arrays.is_mine(self._value):
            self._value = arrays.read(self._value)
        return self._value


def defer(output: Any) -> Any:
    """An engine's outputs as deferred tensors, for code on the CPU; gradients pass."""

    def wrap(_: str, tensor: Any) -> Any:
        if not arrays.is_mine(tensor):
            return tensor
        if tensor.requires_grad:
            return _Deferring.apply(tensor)
        return DeferredTensor(tensor, computes=False)

    return map_tensors(output, wrap)


def undefer(tensor: torch.Tensor) -> torch.Tensor:
    """The value on the devices of a deferred tensor; gradients pass."""
    if not isinstance(tensor, DeferredTensor):
        return tensor
    return _Undeferring.apply(tensor)  # pyrefly: ignore[bad-return]


def as_input(tensor: Any) -> Any:
    """The value of a deferred tensor on its real device, as input of an engine; gradients pass."""
    if not isinstance(tensor, DeferredTensor):
        return tensor
    return undefer(tensor) if arrays.is_mine(tensor._value) else tensor.cpu()


class _Deferring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return DeferredTensor(tensor.detach(), computes=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            # The gradient may itself be differentiated.
            return _uploaded(undefer(grads[0]))
        return _device_value(grads[0])


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: "DeferredTensor") -> torch.Tensor:
        return tensor.read().detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


class _Undeferring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _device_value(tensor).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return _Deferring.apply(grads[0])
        return DeferredTensor(grads[0], computes=True)


def _device_value(tensor: torch.Tensor) -> torch.Tensor:
    return _uploaded(tensor._value if isinstance(tensor, DeferredTensor) else tensor)


def _uploaded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if arrays.is_mine(tensor) else tensor.to(runtime.device())


@contextlib.contextmanager
def _views_alias() -> Iterator[None]:
    """Turns on functionalization, which device views need and which a dispatch excludes."""
    key = torch._C.DispatchKey.Functionalize
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def _on_devices(tree: Any, *, device: bool = False) -> Any:
    """The values of `tree` on the devices; with `device`, also a keyword that names the CPU."""
    moved = tree_map_only(torch.Tensor, _device_value, tree)
    if device and moved.get("device") is not None:
        # `zeros_like(deferred)` asks for the device that the tensor reports.
        moved = {**moved, "device": runtime.device()}
        moved.pop("pin_memory", None)
    return moved


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation reads a value, or none of its tensors computes on the devices."""
    if func is _aten._local_scalar_dense.default:
        return True
    if torch.Tag.dynamic_output_shape in func.tags and func is not _aten.index.Tensor:
        # Operations such as `nonzero` and `unique` give indices and counts, without gradients.
        return True
    if func is _aten._to_copy.default and _leaves_the_cpu(kwargs.get("device")):
        return True
    return not any(t._computes for t in _tensors((args, kwargs)) if isinstance(t, DeferredTensor))


def _leaves_the_cpu(device: Any) -> bool:
    """Whether a move to `device` is one for a tensor that says that it is on the CPU."""
    # ``cpu:0`` is the CPU, to which clients move a loss where LOCAL_RANK is set.
    return device is not None and torch.device(device).type != "cpu"


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes into, according to its schema."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    # Keywords follow, in any order.
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    wanted = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([given[name] for name in wanted if name in given])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _refuse_new_shapes(func: Any, written: Iterable[DeferredTensor]) -> None:
    for tensor in written:
        if tensor._value.shape != tensor.shape:
            _refuse_new_shape(func)


def _refuse_new_shape(func: Any) -> None:
    raise SpmdZeroUsageError(
        f"{func} changes the shape of a tensor that stands for one on the devices, in "
        "place. Take the operation that returns a new one, or read it first: tensor.cpu()"
    )


def _places(mask: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    return _on_cpu(mask).expand(shape).nonzero(as_tuple=True)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read() if isinstance(tensor, DeferredTensor) else tensor


def _read(tree: Any) -> Any:
    return tree_map_only(DeferredTensor, lambda t: t.read(), tree)


def _on_host(func: Any, args: Any, kwargs: Any, *, written: Iterable[torch.Tensor]) -> Any:
    """Runs an operation on the CPU, and copies the tensors it wrote back to the devices."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: DeferredTensor) -> torch.Tensor:
        return copies.setdefault(id(tensor), tensor.read())

    # A collective's arguments hold C++ objects, which are leaves of the tree.
    result = func(*tree_map_only(DeferredTensor, copy, args),
                  **tree_map_only(DeferredTensor, copy, kwargs))  # fmt: skip
    deferred = [t for t in written if isinstance(t, DeferredTensor)]
    _refuse_new_shapes(func, deferred)
    back = [t for t in deferred if t._computes]
    for work in tree_leaves(result) if back else ():
        # A collective may write until `wait` returns.
        if hasattr(work, "wait"):
            work.wait()
    for tensor in back:
        tensor._value.copy_(copies[id(tensor)])
    return result
