"""Views, which differ in torch_xla, because its tensors have no strides."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend.torch_xla.kernels._wrap import Kernel, put_kernel, wrap_kernel
from spmdzero.errors import SpmdZeroRuntimeError

_functionalization: Any = torch._C._functionalization
_Tensor = torch.Tensor
# Functions that return a view where the strides allow it.
_MAY_COPY = {
    torch.reshape,
    torch.flatten,
    torch.ravel,
    _Tensor.reshape,
    _Tensor.reshape_as,
    _Tensor.flatten,
    _Tensor.ravel,
    _Tensor.contiguous,
}

_UNWRITABLE = (_functionalization.expand_ViewMeta, _functionalization.unfold_ViewMeta)


@functools.cache
def mend_views() -> None:
    """Makes two views writable as any other, and `as_strided_` refused.

    These views are an `expand` that only adds dims, and a `squeeze` of no dim.
    """
    wrap_kernel("expand", _adding_dims, key="Functionalize")
    for dims in ("", ".dim", ".dims"):
        wrap_kernel(f"squeeze{dims}", _squeezing, key="Functionalize")
        wrap_kernel(f"squeeze_{dims}", _squeezing_in_place, key="Functionalize")
    put_kernel("as_strided_", _refuse_strides, key="Functionalize")


def _adding_dims(kernel: Kernel) -> Kernel:
    def expand(keys: Any, tensor: torch.Tensor, size: list[int], **implicit: bool) -> Any:
        added = len(size) - tensor.dim()
        own = zip(size[added:], tensor.shape, strict=True)
        if any(n != 1 for n in size[:added]) or any(n not in (-1, had) for n, had in own):
            return kernel(keys, tensor, size, **implicit)
        # torch's inverse would sum, and a sum of small integers has another dtype.
        view = torch.ops.aten.alias.default(tensor)
        for _ in range(added):
            view = view.unsqueeze(0)
        return view

    return expand


def _squeezing(kernel: Kernel) -> Kernel:
    def squeeze(keys: Any, tensor: torch.Tensor, *dims: Any) -> Any:
        if _squeezes(tensor, dims):
            return kernel(keys, tensor, *dims)
        # torch's inverse would give the base the view's own value. torch_xla would then donate the
        # buffer of one to the other, and neither could be read.
        return torch.ops.aten.alias.default(tensor)

    return squeeze


def _squeezing_in_place(kernel: Kernel) -> Kernel:
    def squeeze_(keys: Any, tensor: torch.Tensor, *dims: Any) -> Any:
        return kernel(keys, tensor, *dims) if _squeezes(tensor, dims) else tensor

    return squeeze_


def _squeezes(tensor: torch.Tensor, dims: tuple[Any, ...]) -> bool:
    like = torch.empty(tensor.shape, device="meta")
    return like.squeeze(*dims).dim() < like.dim()


def _refuse_strides(*_: Any, **__: Any) -> Any:
    raise SpmdZeroRuntimeError(
        f"{user_line()}: torch_xla would lose what is written after as_strided_. Use as_strided"
    )


def kept_apart(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of a call, with the first one copied if torch's result would be a copy.

    torch sees by strides that a tensor is transposed, and makes a copy in `x.t().reshape(-1)`. A
    write into the copy must not reach `x`, but with torch_xla it would.
    """
    if func not in _MAY_COPY or not args or args[0].device.type != "xla" or args[0]._base is None:
        return args
    base = args[0]._base
    empty = torch.empty(base.shape, dtype=base.dtype, device="meta")
    # autograd takes the same view of another base, which has strides.
    made = func(args[0]._view_func_unsafe(empty), *args[1:], **kwargs)
    if made.untyped_storage()._cdata == empty.untyped_storage()._cdata:
        return args
    return (args[0].clone(), *args[1:])


@functools.cache
def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def require_places(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Refuses a write into an expanded tensor or into windows, which torch_xla does wrongly.

    torch refuses a write into an expanded tensor that shows an element several times.

    Raises:
        SpmdZeroRuntimeError: the call writes into one; the error names it.
    """
    targets = kwargs.get("out")
    if targets is None and _writes(func) and args:
        targets = args[0]
    if targets is None:
        return
    for target in targets if isinstance(targets, list | tuple) else (targets,):
        if not isinstance(target, torch.Tensor) or not torch._is_functional_tensor(target):
            continue
        steps = _functionalization.get_view_meta_sequence(target)
        if any(isinstance(step, _UNWRITABLE) for step in steps):
            raise SpmdZeroRuntimeError(
                f"{user_line()}: {func.__name__} writes into what expand or unfold returned, which "
                "torch_xla can't. Write into a clone"
            )
