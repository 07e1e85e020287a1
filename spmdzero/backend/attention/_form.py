"""The shapes, dtype and mask that decide which kernels an attention needs."""

import dataclasses
from typing import Literal

import torch

LANES = 128
# Sizes of blocks: what the kernels hold of a block fits a core's vector memory.
_BLOCKS = (1024, 512, 256, 128)
# The largest block under a causal mask; MaxText's default (attentions.py, `sa_block_q`).
_CAUSAL_BLOCK = 512
# The largest allowed part of padding in the padded length, which makes larger blocks possible.
_PADDING = 1 / 8
_DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.bool: "bool",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """The form of an attention; those of the same form run the same kernels.

    Attributes:
        batch, heads, kv_heads: of the query; `kv_heads` of key and value, which divides `heads`.
        q_length, kv_length: padded to whole blocks; as they are for cuDNN.
        kv_used: number of keys before the padding.
        head_dim, value_dim: the widths of query and key, and of value.
        dtype: ``"bfloat16"`` or ``"float32"``, or ``"float16"`` of cuDNN.
        causal: whether query i sees only the keys up to i.
        window: query i sees only keys nearer than this: j with ``|i - j| < window``; None for all.
        soft_cap: c of ``c * tanh(product / c)``, by which products are limited before a mask; None
            for products as they are.
        sinks: whether each head has a number that takes part in the softmax beside the products,
            and of which no value comes.
        mask: the kind of a mask tensor `[1 or batch, 1 or heads, 1 or q_length, kv_length]`:
            ``"bool"`` says what is seen, ``"bias"`` is added to the products in fp32; None for
            none.
        mask_shape: the shape of the mask.
        platform: of the program, as XLA names it: ``"tpu"``, whose kernels ``"cpu"`` interprets,
            or ``"cuda"``, which has cuDNN's.
    """

    batch: int
    heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    kv_used: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    mask: Literal["bool", "bias"] | None
    mask_shape: tuple[int, ...]
    platform: str

    @property
    def interpret(self) -> bool:
        """Whether Pallas interprets the kernels, which then become plain HLO."""
        return self.platform != "tpu"

    @property
    def q_block(self) -> int:
        """Number of queries in a block."""
        return self._block(self.q_length)

    @property
    def kv_block(self) -> int:
        """Number of keys in a block."""
        return self._block(self.kv_length)

    def _block(self, length: int) -> int:
        # A causal mask, or a window, hides more whole blocks if blocks are small.
        small = self.causal or self.window is not None
        return min(block_of(length), _CAUSAL_BLOCK) if small else block_of(length)

    @property
    def scope(self) -> str:
        """Names the kernels' scope beside the direction, for who counts the scores."""
        return (".causal" if self.causal else "") + (
            "" if self.window is None else f".window{self.window}"
        )


def padded_length(length: int) -> int:
    """The length to which `length` positions are padded, a multiple of a block.

    The block is the largest for which at most an eighth of the padded length is padding.
    """
    for block in _BLOCKS:
        padded = -(-length // block) * block
        if padded - length <= _PADDING * padded:
            return padded
    return -(-length // LANES) * LANES


def block_of(padded: int) -> int:
    """The largest block that divides a length that `padded_length` returned."""
    return next(block for block in _BLOCKS if padded % block == 0)


def dtype_name(dtype: torch.dtype) -> str:
    """JAX's name of a dtype that the kernels take."""
    return _DTYPES[dtype]
