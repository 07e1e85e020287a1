"""A torch tensor whose value JAX will compute: operations of it are recorded, not run.

C++ takes it for a tensor on the CPU without memory, so that autograd and views work as torch ships
them; of autocast it has the key of the devices too. Python is told the device ``xla:0``: `_python`
answers what a Python call asks of the device, `_dispatch` records what autograd leaves of it.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend._autocast_lists import keys_of
from spmdzero.backend.jax._cells import Cell
from spmdzero.backend.jax._values import Value
from spmdzero.backend.jax._views import ViewStep
from spmdzero.backend.scan import StandIn
from spmdzero.errors import SpmdZeroRuntimeError

DEVICE = torch.device("xla", 0)
_AUTOCAST = keys_of(DEVICE.type)


class LazyTensor(torch.Tensor):
    """A tensor on the devices of the JAX backend.

    Attributes:
        cell: what it shares with its aliases.
        steps: how it views what the cell holds.
    """

    cell: Cell
    steps: tuple[ViewStep, ...]

    @staticmethod
    def __new__(
        cls, cell: Cell, steps: tuple[ViewStep, ...], like: torch.Tensor, offset: int = 0
    ) -> "LazyTensor":
        """A tensor with the shape, strides and dtype of `like`, which is on the meta device.

        Args:
            cell, steps: see the attributes.
            like: its place in the storage is what it is, and `offset`.
            offset: of what `like` is a view of.
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
        """Nothing is left to do."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where Python code believes it to be."""
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
        return plain.__reduce_ex__(proto)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if StandIn in types:
            # It finds its value first, and calls again.
            return NotImplemented
        return hooks.called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        return hooks.dispatched(func, args, kwargs or {})


# Attributes that make a tensor what it is.
OWN = ("cell", "steps", "_is_param")


class Hooks:
    """What a tensor has others do, who know tensors: they set it when they are imported.

    Attributes:
        called: a Python call of torch's.
        dispatched: an operation below autograd.
        written: one of them that writes.
        assign: `tensor.data = value`.
        text: `repr(tensor)`.
    """

    called: Callable[[Any, tuple[Any, ...], dict], Any]
    dispatched: Callable[[Any, tuple[Any, ...], dict], Any]
    written: Callable[[Any, tuple[Any, ...], dict], Any]
    assign: Callable[[LazyTensor, torch.Tensor], None]
    text: Callable[[LazyTensor], str]


hooks = Hooks()


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def over(value: Value, like: torch.Tensor | None = None) -> LazyTensor:
    """A new tensor that holds `value`, contiguous unless `like` says otherwise."""
    if like is None:
        like = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return LazyTensor(Cell(value), (), like)
    return LazyTensor(Cell(value, like.stride()), (), like)


def become(tensor: LazyTensor, other: LazyTensor) -> None:
    """Gives `tensor` the shape, strides, dtype and place of `other`, and shares its cell."""
    # torch's own setter, which knows nothing of cells; version counter and gradient stay.
    with torch._C.DisableTorchFunctionSubclass():
        if _place(tensor) != _place(other):
            other.cell.turned = True
        torch._C.TensorBase.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor.cell, tensor.steps = other.cell, other.steps


def require_own_part(tensor: LazyTensor) -> None:
    """Refuses a view of which autograd's graph would have another part of its base.

    To torch a tensor like this one, which Python dispatches, is what the view's operations make of
    its base, and it does them once more where the base was written. After a change of shape in
    place, of the base or of the view, they may make another part. A tensor with memory is known
    by its place in that.

    Raises:
        SpmdZeroRuntimeError: autograd is recording, and would have another part.
    """
    if not torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunctionSubclass():
        base = tensor._base
        if base is None:
            return
        # No view reaches beyond it, and the meta device has no memory to run out of.
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
    """Where in its storage its elements are."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def alias_of(
    source: LazyTensor, steps: tuple[ViewStep, ...], like: torch.Tensor, offset: int
) -> LazyTensor:
    """A tensor that shares the cell of `source`, an inference tensor only where that is one."""
    # torch shares the version of a normal tensor, and refuses one that was made in the mode.
    inside = torch.is_inference_mode_enabled() and not source.is_inference()
    with torch.inference_mode(mode=False) if inside else contextlib.nullcontext():
        return LazyTensor(source.cell, steps, like, offset)
