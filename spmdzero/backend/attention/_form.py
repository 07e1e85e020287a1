"""What decides which kernels an attention needs: shapes, dtype, mask."""

import dataclasses
from typing import Literal

import torch

LANES = 128
# A block of the kernels is one of these: what they hold of it fits a core's vector memory.
_BLOCKS = (1024, 512, 256, 128)
# The largest block under a causal mask; MaxText's default (attentions.py, `sa_block_q`).
_CAUSAL_BLOCK = 512
# The largest part of the padded length that may be padding, so that blocks are larger.
_PADDING = 1 / 8
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.bool: "bool"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Two attentions of the same form run the same kernels.

    Attributes:
        batch, heads, kv_heads: of the query, and the heads of key and value, which divide them.
        q_length, kv_length: padded to whole blocks.
        kv_used: keys before the padding.
        head_dim, value_dim: of query and key, and of value.
        dtype: ``"bfloat16"`` or ``"float32"``.
        causal: whether query i sees the keys up to i only.
        mask: what masks as a tensor, `[1 or batch, 1 or heads, 1 or q_length, kv_length]`:
            ``"bool"`` says what is seen, ``"bias"`` is added to the products in fp32; None is none.
        mask_shape: of it.
        platform: that the kernels run on, as XLA names it. Off the TPU they are interpreted.
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
    mask: Literal["bool", "bias"] | None
    mask_shape: tuple[int, ...]
    platform: str

    @property
    def interpret(self) -> bool:
        """Whether Pallas interprets the kernels: they become plain HLO."""
        return self.platform != "tpu"

    @property
    def q_block(self) -> int:
        """Queries in a block."""
        return self._block(self.q_length)

    @property
    def kv_block(self) -> int:
        """Keys in a block."""
        return self._block(self.kv_length)

    def _block(self, length: int) -> int:
        # The smaller the blocks, the more of them a causal mask hides whole.
        return min(block_of(length), _CAUSAL_BLOCK) if self.causal else block_of(length)


def padded_length(length: int) -> int:
    """The length of whole blocks that `length` positions are padded to.

    The largest block that the length, with at most an eighth of padding, is a multiple of.
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
    """As JAX names it, of one that the kernels take."""
    return _DTYPES[dtype]
