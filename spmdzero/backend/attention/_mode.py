"""Intercepts calls of `scaled_dot_product_attention` in a forward, and records how each ran."""

import contextlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Protocol
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from spmdzero._logging import log_once
from spmdzero._user_line import user_line
from spmdzero.backend._current import current, runtime
from spmdzero.backend.attention._call import Call, PlainError, Seen
from spmdzero.backend.attention._function import Kernels
from spmdzero.backend.attention._products import attention_products
from spmdzero.backend.attention._transformers import (
    masks_noted,
    masks_without_reading,
    what_is_seen,
    with_caps_and_sinks,
)
from spmdzero.backend.forms._work import counted_as, is_counting
from spmdzero.backend.protocols._region import AttentionCall, AttentionChoice
from spmdzero.errors import SpmdZeroRuntimeError

_EXPAND = torch.Tensor.expand
_RESHAPE = (torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten)
_INTERLEAVE = (torch.Tensor.repeat_interleave, torch.repeat_interleave)
_HEADS = 1


class Repeated:
    """Takes note of tensors `[rows, heads, length, width]` whose heads are repeated ones.

    Models repeat by an `expand` of `[rows, heads, 1, length, width]` and a reshape, as
    transformers' `repeat_kv` does, or by `repeat_interleave`. The kernels read each head for all
    of its queries, so they need no repeated ones.
    """

    def __init__(self) -> None:
        self._expanded = WeakTensorKeyDictionary()
        self._before = WeakTensorKeyDictionary()

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, made: Any) -> None:
        """Takes note of what `func` made of its arguments."""
        if func is _EXPAND:
            base = args[0]
            if base.dim() == made.dim() == 5 and _is_of_heads(base.shape, made.shape):
                self._expanded[made] = base
        elif func in _RESHAPE and made.dim() == 4 and args[0] in self._expanded:
            rows, heads, times, *rest = args[0].shape
            if made.shape == (rows, heads * times, *rest):
                self._keep(made, self._expanded[args[0]].squeeze(2))
        elif func in _INTERLEAVE and args[0].dim() == made.dim() == 4:
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
            dim = args[2] if len(args) > 2 else kwargs.get("dim")
            if isinstance(repeats, int) and dim in (_HEADS, _HEADS - 4):
                self._keep(made, args[0])

    def _keep(self, made: torch.Tensor, before: torch.Tensor) -> None:
        self._before[made] = before, _versions(made, before)

    def before(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Key and value as they were before, where both were repeated alike; None otherwise."""
        found = []
        for made in (key, value):
            before, versions = self._before.get(made, (None, ()))
            # What was written in place since is no repeated tensor any more.
            if before is None or versions != _versions(made, before):
                return None
            found.append(before)
        same = found[0].shape[_HEADS] == found[1].shape[_HEADS]
        return (found[0], found[1]) if same else None


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


def _is_of_heads(one: torch.Size, many: torch.Size) -> bool:
    return one[2] == 1 and one[:2] == many[:2] and one[3:] == many[3:]


_ATTENTION = F.scaled_dot_product_attention
_NOTHING_SAID = Seen(causal=False, window=None, keys=None)


class Rows(Protocol):
    """How devices that share rows compute attention of them."""

    def attend(self, attention: Callable[..., Any], *tensors: torch.Tensor, **more: Any) -> Any:
        """The output of `attention`, as torch's, of query, key and value."""


class AttentionKernels(TorchFunctionMode):
    """Computes attention by kernels where the config asks for them and they can.

    Args:
        choice: ``"auto"`` uses kernels in programs for TPUs and GPUs, ``"kernel"`` in all: the CPU
            interprets them, slowly.
        kernels: those of the backend.
        owner: the module whose forward runs, to name submodules.
        is_global: whether the forward runs in global space, where no kernel can run.
        rows: moves rows that devices share around each call; None where none are.

    Attributes:
        calls: how each call was computed, in order; empty if ``"auto"`` is for a CPU.
    """

    def __init__(
        self,
        choice: AttentionChoice,
        kernels: Kernels,
        *,
        owner: nn.Module,
        is_global: bool = False,
        rows: Rows | None = None,
    ) -> None:
        super().__init__()
        self._kernels, self._rows = kernels, rows
        self._owner, self._always, self._is_global = owner, choice == "kernel", is_global
        platform = runtime.program_platform().lower()
        self._platform = platform if platform in ("tpu", "cuda") else "cpu"
        self._active = choice != "plain" and (self._platform != "cpu" or self._always)
        # A forward that is only counted is computed as torch does, whatever the choice.
        self._counts = is_counting()
        self.calls: list[AttentionCall] = []
        self._repeated = Repeated()
        self._around = contextlib.ExitStack()

    def __enter__(self) -> Any:
        """Enters the mode."""
        self._around.enter_context(masks_without_reading(self._owner))
        if self._active or self._counts:
            self._around.enter_context(masks_noted())
            if self._rows is None or self._counts:
                own = with_caps_and_sinks(self._capped, self._counted)
                self._around.enter_context(own)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        """Leaves the mode."""
        super().__exit__(exc_type, exc_val, exc_tb)
        self._around.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`; attention by kernels has the dtype of the plain result."""
        kwargs = kwargs or {}
        if not self._active and self._rows is None and not self._counts:
            return func(*args, **kwargs)
        if func is _ATTENTION:
            return self._called(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # A mode doesn't see calls inside torch's own functions; this one calls attention.
            with mock.patch.object(F, "scaled_dot_product_attention", self._called):
                return func(*args, **kwargs)
        made = func(*args, **kwargs)
        if self._active:
            self._repeated.note(func, args, kwargs, made)
        return made

    def _called(self, query: Any, key: Any, value: Any, *more: Any, **named: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, more, strict=False)), **named}
        if query.device.type != current().device_type:
            return _ATTENTION(query, key, value, **given)
        if self._counts:
            seen = what_is_seen(given.get("attn_mask")) or _NOTHING_SAID
            causal = bool(given.get("is_causal")) or seen.causal
            with counted_as(
                *attention_products(query, key, value, causal=causal, window=seen.window)
            ):
                return _ATTENTION(query, key, value, **given)
        if self._rows is None:
            return self._attention(query, key, value, **given)
        return self._rows.attend(self._attention, query, key, value, **given)

    def _counted(
        self, query: Any, key: Any, value: Any, mask: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Context in which a model's own function counts as attention, where its mask is known."""
        seen = what_is_seen(mask) if self._counts else None
        if seen is None:
            return contextlib.nullcontext()
        return counted_as(
            *attention_products(query, key, value, causal=seen.causal, window=seen.window)
        )

    def _attention(self, query: Any, key: Any, value: Any, **given: Any) -> Any:
        if not self._active:
            return _ATTENTION(query, key, value, **given)
        own, options = (key, value), dict(given)
        if (before := self._repeated.before(key, value)) is not None:
            own, options["enable_gqa"] = before, True
        out = self._by_kernel(query, *own, **options)
        return _ATTENTION(query, key, value, **given) if out is None else out

    def _capped(self, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        """Attention with a soft cap or sinks by a kernel; None where the model has to compute it.

        Key and value have a head for each group of queries, and no mask shows all.
        """
        if query.device.type != current().device_type or self._counts:
            return None
        return self._by_kernel(query, key, value, attn_mask=mask, enable_gqa=True, **given)

    def _by_kernel(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        """The output of a kernel, as torch's; None, which is noted, where none computes it."""
        where = user_line(self._owner)
        try:
            self._require_a_way()
            seen = what_is_seen(options.get("attn_mask"))
            if seen is not None and not options.get("is_causal"):
                options |= {"attn_mask": None, "seen": seen}
            call = Call(query=_cast(query), key=_cast(key), value=_cast(value), **options)
            call.require_kernel(short=self._always, platform=self._platform)
        except PlainError as reason:
            self.calls.append(AttentionCall(where=where, plain_because=str(reason)))
            log_once(
                f"{where}: attention is computed as plain products, not by a kernel, because "
                f"{reason}"
            )
            return None
        self.calls.append(AttentionCall(where=where, plain_because=None))
        return call.run(self._kernels, platform=self._platform)

    def _require_a_way(self) -> None:
        if self._is_global:
            raise PlainError("the forward is global, and GSPMD can't split a kernel")
        said, fix = _missing(self._platform), self._kernels.install
        if said is None:
            return
        if self._always:
            raise SpmdZeroRuntimeError(f'"spmd": {{"attention": "kernel"}}: {said}: {fix}')
        raise PlainError(f"{said}: {fix}")


def _missing(platform: str) -> str | None:
    """The reason why the installed JAX's kernels can't be used."""
    if platform == "cuda":
        from spmdzero.backend.attention._cudnn import is_as_known
    else:
        from spmdzero.backend.attention._splash import is_as_known

    found = importlib.metadata.version("jax")
    return None if is_as_known() else f"jax {found} has other kernels than those that are known"


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Casts `tensor` as autocast casts the operands of a product."""
    devices = current().device_type
    if torch.is_autocast_enabled(devices) and tensor.is_floating_point():
        return tensor.to(torch.get_autocast_dtype(devices))
    return tensor
