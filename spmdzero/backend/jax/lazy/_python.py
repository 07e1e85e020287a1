"""Answers to Python calls that ask a lazy tensor's device, which C++ takes for the CPU."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmdzero._user_line import user_line
from spmdzero.backend.forms._said import unsay
from spmdzero.backend.forms._tree import found, map_tensors
from spmdzero.backend.jax.lazy import _plain_autograd
from spmdzero.backend.jax.lazy._dispatch import dispatched, read, replace, value_of
from spmdzero.backend.jax.lazy._tensor import (
    DEVICE,
    OWN,
    LazyTensor,
    become,
    hooks,
    over,
    require_own_part,
)
from spmdzero.backend.replica import in_region

_Tensor = torch.Tensor
Answer = Callable[..., Any]
_answers: dict[Any, Answer] = {}
# Calls that take tensors of two devices: those of recurrent layers take the sizes of packed rows.
_MIXED = {
    _Tensor.copy_, _Tensor.__getitem__, _Tensor.__setitem__, torch.index_put, _Tensor.index_put,
    _Tensor.index_put_, _Tensor.set_, _Tensor.type_as, torch.equal,
    _Tensor.equal, torch.ctc_loss, torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh,
}  # fmt: skip


class _Mixing:
    """Whether a call outside of the region may take tensors on the CPU beside those on devices."""

    is_allowed = False


mixing = _Mixing()
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_C_CALLS = (type(torch.add), type(_Tensor.add))
# The type of attribute reads, as of a shape: casts don't concern them, and a step has hundreds.
_READS = type(_Tensor.shape.__get__)  # type: ignore[missing-attribute]


def answer(*funcs: Any) -> Callable[[Answer], Answer]:
    """Decorator of a function that answers these calls."""

    def add(function: Answer) -> Answer:
        _answers.update(dict.fromkeys(funcs, function))
        return function

    return add


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answers a call of torch's Python functions that takes a lazy tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        if func in _answers:
            return _answers[func](*args, **kwargs)
        if type(func) is _READS and func.__name__ == "__get__":
            return func(*args)
        if (
            kwargs.get("device") is not None
            and torch.device(kwargs["device"]).type == "cpu"
            # A dispatch mode passes on operations whose device C++ takes for the CPU.
            and not isinstance(func, torch._ops.OpOverload)
        ):
            like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
            return func(like, *args[1:], **kwargs)
        if isinstance(func, _C_CALLS) and func not in _MIXED:
            args = _on_one_device(func, args)
        with _autocast_as_on_devices():
            return func(*args, **kwargs)


hooks.called = called


def _autocast_as_on_devices() -> contextlib.AbstractContextManager[object]:
    """Keeps C++, which takes the tensors for CPU tensors, from casting by the CPU's lists."""
    if torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    return contextlib.nullcontext()


def _on_one_device(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call on one device, if `mixing` says that they may come from two.

    Raises:
        RuntimeError: they are on two devices.
    """
    tensors = found(args, torch.Tensor)
    plain = [t for t in tensors if _is_on_host(t)]
    if not plain or len(plain) == len(tensors) or any(t.is_meta for t in plain):
        return args
    # A tensor of another class, as one that reports a device, answers for itself.
    if not mixing.is_allowed or in_region() or any(type(t) not in _PLAIN for t in plain):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE} and {plain[0].device}!\n{user_line(otherwise='This call')}: what the engine "
            f"returned is on engine.device. Move a tensor of shape {list(plain[0].shape)} there, "
            ".to(engine.device), or bring the other to the host, .cpu()"
        )
    # What is written on the CPU stays there; everything else is computed on the devices.
    name, first = func.__name__, found(args[:1], torch.Tensor)
    writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if writes and any(map(_is_on_host, first)):
        return map_tensors(args, lambda _, t: to_host(t) if isinstance(t, LazyTensor) else t)
    return map_tensors(args, lambda _, t: t.to(DEVICE) if _is_on_host(t) else t)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, LazyTensor) and tensor.dim() > 0 and not _wraps(tensor)


def _wraps(tensor: torch.Tensor) -> bool:
    """Whether `tensor` wraps another one for torch.func, which may be on any device."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return read(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].to(DEVICE)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, through which gradients come back."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _ToHost.apply(tensor)  # type: ignore[return-value]
    return read(tensor)


@answer(_Tensor.to)
def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    other = kwargs.pop("other", None)
    if args and isinstance(args[0], torch.Tensor):
        other, args = args[0], args[1:]
    if other is not None:
        return _to(tensor, other.device, other.dtype, *args, **kwargs)
    copy = kwargs.pop("copy", False)
    if len(args) > 2 and isinstance(args[-1], bool):
        copy, args = args[-1], args[:-1]
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    if not isinstance(tensor, LazyTensor):
        return tensor.to(device=DEVICE if device is None else device, dtype=dtype)
    if device is not None and device.type == "cpu":
        tensor = to_host(tensor)
        return tensor if dtype is None else tensor.to(dtype)
    if device is not None and device.type not in ("xla", "meta"):
        raise RuntimeError(f"a tensor on {DEVICE} can't be moved to {device}: use .cpu()")
    if device is not None and device.type == "meta":
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta"
        )
    options: dict[str, Any] = {} if layout is None else {"memory_format": layout}
    return tensor.to(dtype or tensor.dtype, copy=copy, **options)


@answer(_Tensor.cpu)
def _cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return to_host(tensor)


@answer(_Tensor.type_as)
def _type_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _to(tensor, other.device, other.dtype)


@answer(_Tensor.new_tensor)
def _new_tensor(tensor: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": DEVICE} | kwargs
    return torch.tensor(data, **options)


@answer(_Tensor.numpy)
def _numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    return _array(tensor.detach() if force else tensor)


@answer(_Tensor.__array__)
def _array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.requires_grad:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    array = read(tensor).numpy()
    return array.astype(args[0]) if args and args[0] is not None else array


@answer(_Tensor.tolist)
def _tolist(tensor: torch.Tensor) -> Any:
    return read(tensor.detach()).tolist()


@answer(_Tensor.item)
def _item(tensor: torch.Tensor) -> Any:
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    # Computing a view would take another program.
    scalar = tensor.reshape(()) if tensor.dim() else tensor
    return dispatched(torch.ops.aten._local_scalar_dense.default, (scalar,), {})


@answer(_Tensor.__format__)
def _format(tensor: torch.Tensor, spec: str) -> str:
    # torch formats the number only of its own class's tensors. Replicas have one number each.
    if tensor.dim() or (in_region() and not spec):
        return object.__format__(tensor, spec)
    return format(_item(tensor), spec)


# Hooks and autograd Functions are the user's code, whose calls are answered here too.
@answer(_Tensor.backward)
def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, inputs: Any = None,
) -> None:  # fmt: skip
    _require_own_parts(tensor)
    with torch._C._EnableTorchFunction():
        _plain_autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


@answer(torch.autograd.backward)
def _backward_of_several(*args: Any, **kwargs: Any) -> None:
    # A newer torch arrives here.
    _require_own_parts(args[:1], kwargs.get("tensors"))
    with torch._C._EnableTorchFunction():
        _plain_autograd.backward(*args, **kwargs)


@answer(torch.autograd.grad)
def _grad(*args: Any, **kwargs: Any) -> Any:
    _require_own_parts(args[:1], kwargs.get("outputs"))
    with torch._C._EnableTorchFunction():
        return _plain_autograd.grad(*args, **kwargs)


def _require_own_parts(*roots: Any) -> None:
    for tensor in found(roots, LazyTensor):
        if tensor.cell.turned:
            require_own_part(tensor)


@answer(F.scaled_dot_product_attention)
def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    # The CPU's flash attention is a single operation; XLA fuses the plain one.
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


@answer(_Tensor.norm)
def _own_norm(
    tensor: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    return _norm(tensor, p, dim, keepdim, dtype=dtype)


@answer(torch.functional.norm)
def _norm(
    tensor: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    # torch does the same on devices that it knows, and warns about an older way on others.
    order = 2.0 if p is None or p == "fro" else p
    if isinstance(order, str):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.functional.norm(tensor, p, dim, keepdim, out, dtype)
    return torch.linalg.vector_norm(tensor, order, dim, keepdim, dtype=dtype, out=out)


@answer(torch._has_compatible_shallow_copy_type)
def _may_take_its_place(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return isinstance(tensor, LazyTensor) == isinstance(other, LazyTensor)


@answer(_Tensor.is_shared, _Tensor.is_pinned)
def _never(*_: Any, **__: Any) -> bool:
    return False


def no_memory(what: str) -> str:
    """A message: `what` of a tensor is asked for, and what to do."""
    return f"{what} of a tensor on {DEVICE}, which has no memory here. Use .cpu()"


def _refusing(name: str) -> Answer:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(no_memory(name))

    return refuse


_WITH_MEMORY = ("storage", "share_memory_", "apply_", "map_")
# For these torch would import torch_xla, which can't share a process with JAX.
_OF_TORCH_XLA = ("__dlpack__", "__dlpack_device__")
for _name in (*_WITH_MEMORY, *_OF_TORCH_XLA):
    _answers[getattr(_Tensor, _name)] = _refusing(_name)


def assign(tensor: LazyTensor, value: torch.Tensor) -> None:
    """Assigns `value` to `tensor.data`; it may have another shape or dtype, as peft's adapters get.

    Raises:
        RuntimeError: `value` has another shape or dtype, and the tensor is an engine's parameter,
            has a gradient, or is held by a weak reference or a graph.
    """
    unsay(tensor)
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        _become_another(tensor, value)
    elif isinstance(value, LazyTensor):
        tensor.cell.succeeded_by(value.cell)
        become(tensor, value)
    else:
        replace(tensor, value_of(value))


def _become_another(tensor: LazyTensor, value: torch.Tensor) -> None:
    told = (
        f"tensor.data of {list(tensor.shape)} {tensor.dtype} on {DEVICE} is assigned "
        f"{list(value.shape)} {value.dtype}"
    )
    # Parameters of an engine have a class of their own: it has a plan and a program for each.
    if type(tensor) is not LazyTensor or tensor.grad is not None:
        raise RuntimeError(f"{told}: make a new tensor instead")
    made: Any = value.detach() if isinstance(value, LazyTensor) else over(value_of(value))
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    # What a script, or peft, has written beside it stays with the name.
    made.__dict__.update({k: v for k, v in vars(tensor).items() if k not in OWN})
    try:
        torch.utils.swap_tensors(tensor, made)
    except RuntimeError as error:
        raise RuntimeError(f"{told}: make a new tensor instead ({error})") from error


hooks.assign = assign
