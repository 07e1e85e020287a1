"""A torch tensor whose value JAX will compute: its operations are recorded, not run.

C++ takes it for a CPU tensor without memory, so that torch's own autograd and views work; it also
carries the devices' key of autocast. Python sees the device ``xla:0``: `_python` answers Python
calls that depend on the device, and `_dispatch` records the operations below autograd.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend._autocast_lists import keys_of
from spmdzero.backend.jax.lazy._cells import Cell
from spmdzero.backend.jax.lazy._pending_block import StandIn
from spmdzero.backend.jax.lazy._values import Value
from spmdzero.backend.jax.lazy._views import ViewStep
from spmdzero.errors import SpmdZeroRuntimeError

DEVICE = torch.device("xla", 0)
_AUTOCAST = keys_of(DEVICE.type)


class LazyTensor(torch.Tensor):
    """A tensor on the devices of the JAX backend.

    Attributes:
        cell: the value that it shares with its aliases.
        steps: the views between the cell's value and this tensor.
    """

    cell: Cell
    steps: tuple[ViewStep, ...]

    @staticmethod
    def __new__(
        cls, cell: Cell, steps: tuple[ViewStep, ...], like: torch.Tensor, offset: int = 0
    ) -> "LazyTensor":
        """Makes a tensor with the shape, strides and dtype of `like`, which is on the meta device.

        Args:
            cell, steps: see the attributes.
            like: its offset in the storage, added to `offset`, is that of the new tensor.
            offset: that of the tensor which `like` is a view of.
        """
        made = torch.Tensor._make_wrapper_subclass(  # pyrefly: ignore[missing-attribute]
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset() + offset,
            dtype=like.dtype, device=torch.device("cpu"), _extra_dispatch_keys=_AUTOCAST,
        )  # fmt: skip
        made.cell, made.steps = cell, steps
        return made

    def __init__(
        self, cell: Cell, steps: tuple[ViewStep, ...], like: torch.Tensor, offset: int = 0
    ) -> None:
        """Does nothing: `__new__` has done all."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that Python code sees."""
        return DEVICE

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same tensor without a gradient."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        hooks.assign(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return hooks.text(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            made = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                made = torch.nn.Parameter(made, self.requires_grad)
            else:
                made.requires_grad_(self.requires_grad)
            made.__dict__.update(
                {k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k not in OWN}
            )
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        plain = self.detach().cpu()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        else:
            plain.requires_grad_(self.requires_grad)
        plain.__dict__.update({k: v for k, v in vars(self).items() if k not in OWN})
        return plain.__reduce_ex__(proto)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if StandIn in types:
            # The stand-in computes its value first, and then calls again.
            return NotImplemented
        return hooks.called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        return hooks.dispatched(func, args, kwargs or {})


# Attributes that make a tensor a lazy one.
OWN = ("cell", "steps", "_is_param")


class Hooks:
    """Functions for a tensor that other modules set when they are imported.

    Attributes:
        called: answers a Python call of torch's.
        dispatched: answers an operation below autograd.
        written: answers an operation that writes.
        drawn: answers a draw that is given a `torch.Generator`.
        assign: does `tensor.data = value`.
        text: makes `repr(tensor)`.
    """

    called: Callable[[Any, tuple[Any, ...], dict], Any]
    dispatched: Callable[[Any, tuple[Any, ...], dict], Any]
    written: Callable[[Any, tuple[Any, ...], dict], Any]
    drawn: Callable[[Any, tuple[Any, ...], dict], Any]
    assign: Callable[[LazyTensor, torch.Tensor], None]
    text: Callable[[LazyTensor], str]


hooks = Hooks()


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def over(value: Value, like: torch.Tensor | None = None) -> LazyTensor:
    """A new tensor that holds `value`, contiguous unless `like` says otherwise."""
    if like is None:
        return LazyTensor(Cell(value), (), _contiguous(value.shape, value.dtype))
    return LazyTensor(Cell(value, like.stride()), (), like)


@functools.lru_cache(maxsize=1024)
def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def become(tensor: LazyTensor, other: LazyTensor) -> None:
    """Gives `tensor` the shape, strides, dtype and place of `other`, and its cell."""
    # This is torch's own setter, which doesn't know cells; version counter and gradient stay.
    with torch._C.DisableTorchFunctionSubclass():
        if _place(tensor) != _place(other):
            other.cell.turned = True
        torch._C.TensorBase.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor.cell, tensor.steps = other.cell, other.steps


def require_own_part(tensor: LazyTensor) -> None:
    """Refuses a view for which autograd would compute the gradient of another part of its base.

    torch repeats the operations of a view on its base, if the base was written and Python
    dispatches its tensors. After a change of shape in place, of the base or of the view, they may
    give another part. (A tensor with memory is known by its place in it.)

    Raises:
        SpmdZeroRuntimeError: autograd is recording, and would take another part.
    """
    if not torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunctionSubclass():
        base = tensor._base
        if base is None:
            return
        # No view reaches beyond this size, and a tensor on the meta device takes no memory.
        like = torch.empty(1 << 48, dtype=base.dtype, device="meta")
        like = like.as_strided(base.shape, base.stride(), base.storage_offset())
        try:
            same = _place(tensor._view_func_unsafe(like)) == _place(tensor)
        except (RuntimeError, IndexError):
            same = False
    if not same:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: a view of shape {list(tensor.shape)} is used, and it or what it views "
            "was given another shape or place in place since the view was taken (by transpose_, "
            "squeeze_ or their like, or by .data): autograd would have the gradient of another "
            "part. Take the view again, or change no shape in place: y = y.transpose(0, 1)"
        )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The place of the tensor's elements in its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def alias_of(
    source: LazyTensor, steps: tuple[ViewStep, ...], like: torch.Tensor, offset: int
) -> LazyTensor:
    """A tensor that shares the cell of `source`; it is an inference tensor only if that is one."""
    # torch shares a normal tensor's version, but refuses that of a tensor made in inference mode.
    inside = torch.is_inference_mode_enabled() and not source.is_inference()
    with torch.inference_mode(mode=False) if inside else contextlib.nullcontext():
        return LazyTensor(source.cell, steps, like, offset)
