"""A call of `scaled_dot_product_attention` in the kernels' form, or why none computes it."""

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from spmdzero.backend.attention._form import LANES, Form, dtype_name, padded_length
from spmdzero.backend.attention._function import Kernels, attend

# A head's width is padded with zeros to whole sublanes of 16-bit numbers.
_WIDTH = 16
# The widest head of cuDNN's on every GPU that has it.
_CUDNN_WIDTH = 128
_TAKEN = {"cuda": (torch.bfloat16, torch.float16)}


class PlainError(Exception):
    """The kernels don't compute a call; the text says why, to be read after "because"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Says what a mask `[rows, 1, queries, keys]` lets queries see, where it is known.

    Attributes:
        causal: query i sees only the keys up to i.
        window: query i sees only keys j with ``|i - j| < window``; None for all.
        keys: bool `[rows, 1, 1, keys]`, the keys that are seen at all; None for all.
    """

    causal: bool
    window: int | None
    keys: torch.Tensor | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, by torch's names.

    And what torch's has no arguments for: `seen` in place of a mask, and `soft_cap` and `sinks`,
    `[heads]`, as `Form` says.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    seen: Seen | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def _mask(self) -> torch.Tensor | None:
        return self.attn_mask if self.seen is None else self.seen.keys

    def require_kernel(self, *, short: bool, platform: str = "tpu") -> None:
        """Checks that the kernels can compute the call.

        Args:
            short: whether to take lengths below a block too, which are mostly padding.
            platform: of the program, see `Form`.

        Raises:
            PlainError: they can't.
        """
        if self.dropout_p > 0.0:
            raise PlainError("the kernels drop no weights (dropout_p > 0)")
        tensors = (self.query, self.key, self.value)
        dtypes = {tensor.dtype for tensor in tensors}
        taken = _TAKEN.get(platform, (torch.bfloat16, torch.float32))
        if not dtypes <= {*taken} or len(dtypes) > 1:
            names = " and ".join(sorted(map(_name, dtypes)))
            raise PlainError(f"the kernels take {' or '.join(map(_name, taken))}, not {names}")
        if any(tensor.dim() not in (3, 4) for tensor in tensors) or self.query.dim() != (
            self.key.dim()
        ):
            raise PlainError("the kernels take [batch, heads, length, width]")
        if not short and platform != "cuda":
            self._require_lengths()
        self._require_heads()
        if self._mask is not None:
            self._require_mask(self._mask)
        if platform == "cuda":
            self._require_cudnn()

    def _require_cudnn(self) -> None:
        if self._mask is not None:
            raise PlainError("cuDNN is asked for causal masks and windows alone")
        if self.seen is not None and self.seen.window is not None and not self.seen.causal:
            raise PlainError("cuDNN's windows are causal")
        if self.soft_cap is not None or self.sinks is not None:
            raise PlainError("cuDNN is asked for no soft caps and no sinks")
        width, own = self.query.shape[-1], self.value.shape[-1]
        if width != own or width > _CUDNN_WIDTH:
            said = f"{width}" if width == own else f"{width} and {own}"
            raise PlainError(f"cuDNN is asked for heads up to {_CUDNN_WIDTH} wide, not {said}")

    def _require_lengths(self) -> None:
        lengths = self.query.shape[-2], self.key.shape[-2]
        if min(lengths) < LANES:
            said = " and ".join(f"{length}" for length in dict.fromkeys(lengths))
            raise PlainError(f"a block of the kernels has {LANES} positions, and here are {said}")

    def _require_heads(self) -> None:
        heads, own = self.query.shape[:-2], self.key.shape[:-2]
        grouped = self.enable_gqa and own[-1] > 0 and heads[-1] % own[-1] == 0
        if (
            self.key.shape[:-1] != self.value.shape[:-1]
            or heads[:-1] != own[:-1]
            or not (heads == own or grouped)
        ):
            raise PlainError("rows or heads of query, key and value are broadcast")

    def _require_mask(self, mask: torch.Tensor) -> None:
        if self.is_causal:
            raise PlainError("a mask and is_causal exclude each other")
        if mask.requires_grad and torch.is_grad_enabled():
            raise PlainError("the mask wants a gradient, which the kernels don't compute")
        if mask.dtype not in (torch.bool, torch.bfloat16, torch.float32):
            raise PlainError(f"the mask is {_name(mask.dtype)}")
        if mask.dim() > self.query.dim():
            raise PlainError("the mask has more dims than the query")
        whole = (*self.query.shape[:-1], self.key.shape[-2])
        shape = _of_four(mask, self.query.dim()).shape
        whole = whole if len(whole) == 4 else (whole[0], 1, *whole[1:])
        if any(length not in (1, full) for length, full in zip(shape, whole, strict=True)):
            raise PlainError("the mask has another shape than the weights")

    def run(self, kernels: Kernels, *, platform: str) -> torch.Tensor:
        """The output, as torch's, by the kernels; `require_kernel` has to have passed."""
        dims = self.query.dim()
        q, k, v = (_of_four(tensor, dims) for tensor in (self.query, self.key, self.value))
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        mask = None if self._mask is None else _of_four(self._mask, dims)
        seen = self.seen or Seen(causal=self.is_causal, window=None, keys=None)
        q_length, kv_length = q.shape[2], k.shape[2]
        if platform != "cuda":
            q_length, kv_length = padded_length(q_length), padded_length(kv_length)
        q = _padded(q * scale, q_length)
        k, v = _padded(k, kv_length), _padded(v, kv_length)
        form = Form(
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            q_length=q_length,
            kv_length=kv_length,
            kv_used=self.key.shape[-2],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=dtype_name(q.dtype),
            causal=seen.causal,
            window=seen.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks is not None,
            mask=None if mask is None else "bool" if mask.dtype == torch.bool else "bias",
            mask_shape=() if mask is None else _mask_shape(mask, q_length, kv_length),
            platform=platform,
        )
        masks = [] if mask is None else [_padded_mask(mask, form)]
        sinks = [] if self.sinks is None else [self.sinks.float().reshape(1, -1, 1, 1)]
        out = attend(kernels, form, [q, k, v, *masks, *sinks])
        out = out[:, :, : self.query.shape[-2], : self.value.shape[-1]]
        return out if dims == 4 else out.squeeze(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_four(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """`[batch, heads, length, width]`; dims that are missing become 1."""
    if dims == 3:
        tensor = tensor.reshape((1,) * (3 - tensor.dim()) + tuple(tensor.shape)).unsqueeze(1)
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    width = -tensor.shape[3] % _WIDTH
    more = length - tensor.shape[2]
    return F.pad(tensor, (0, width, 0, more)) if width or more else tensor


def _mask_shape(mask: torch.Tensor, q_length: int, kv_length: int) -> tuple[int, ...]:
    return (*mask.shape[:2], q_length if mask.shape[2] > 1 else 1, kv_length)


def _padded_mask(mask: torch.Tensor, form: Form) -> torch.Tensor:
    mask = mask.expand(*mask.shape[:3], form.kv_used)
    sizes: Sequence[int] = (
        0, form.kv_length - form.kv_used, 0, form.mask_shape[2] - mask.shape[2]
    )  # fmt: skip
    if not any(sizes):
        return mask
    # torch_xla can't pad bools.
    if mask.dtype == torch.bool:
        return F.pad(mask.to(torch.int32), sizes) != 0
    return F.pad(mask, sizes, value=float("-inf"))
