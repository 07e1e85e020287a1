"""Takes the calls of `scaled_dot_product_attention` in a forward, and notes what became of each."""

import importlib.metadata
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from spmdzero._logging import log_once
from spmdzero._user_line import user_line
from spmdzero.backend._region import AttentionCall, AttentionChoice
from spmdzero.backend.torch_xla import runtime
from spmdzero.backend.torch_xla.attention._call import Call, PlainError
from spmdzero.backend.torch_xla.attention._function import has_jax
from spmdzero.errors import SpmdZeroRuntimeError

_ATTENTION = F.scaled_dot_product_attention
# What their masks and blocks are written in is private to it.
_JAX = "0.7.1"


class AttentionKernels(TorchFunctionMode):
    """Computes attention by kernels where the config wants them and they can.

    Args:
        choice: ``"auto"`` takes kernels in programs for TPUs, ``"kernel"`` in all: off the TPU
            they are interpreted, slowly.
        owner: the module whose forward runs, to name submodules.
        never: why no call can be a kernel here, None where they can.

    Attributes:
        calls: what was computed how, in order; none where ``"auto"`` is not for a TPU.
    """

    def __init__(
        self, choice: AttentionChoice, *, owner: nn.Module, never: str | None = None
    ) -> None:
        super().__init__()
        self._owner, self._always, self._never = owner, choice == "kernel", never
        on_tpu = runtime.program_platform() == "TPU"
        self._platform = "tpu" if on_tpu else "cpu"
        self._active = choice != "plain" and (on_tpu or self._always)
        self.calls: list[AttentionCall] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`; an attention's result has the dtype of the plain one."""
        kwargs = kwargs or {}
        if not self._active:
            return func(*args, **kwargs)
        if func is _ATTENTION:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # A mode doesn't see what torch's own functions call, and this one calls it.
            with mock.patch.object(F, "scaled_dot_product_attention", self._attention):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, query: Any, key: Any, value: Any, *more: Any, **named: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, more, strict=False)), **named}
        if query.device.type != "xla":
            return _ATTENTION(query, key, value, **given)
        where = user_line(self._owner)
        try:
            self._require_a_way()
            call = Call(query=_cast(query), key=_cast(key), value=_cast(value), **given)
            call.require_kernel(short=self._always)
        except PlainError as reason:
            self.calls.append(AttentionCall(where=where, plain_because=str(reason)))
            log_once(
                f"{where}: attention is computed as plain products, not by a kernel, because "
                f"{reason}"
            )
            return _ATTENTION(query, key, value, **given)
        self.calls.append(AttentionCall(where=where, plain_because=None))
        return call.run(self._platform)

    def _require_a_way(self) -> None:
        if self._never is not None:
            raise PlainError(self._never)
        found = importlib.metadata.version("jax") if has_jax() else None
        if found == _JAX:
            return
        said = "jax is not installed" if found is None else f"jax {found} is installed"
        fix = f"the kernels are written in jax {_JAX}: pip install 'spmdzero[tpu]'"
        if self._always:
            raise SpmdZeroRuntimeError(f'"spmd": {{"attention": "kernel"}}: {said}, and {fix}')
        raise PlainError(f"{said}, and {fix}")


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """As autocast casts the operands of a product."""
    if torch.is_autocast_enabled("xla") and tensor.is_floating_point():
        return tensor.to(torch.get_autocast_dtype("xla"))
    return tensor
