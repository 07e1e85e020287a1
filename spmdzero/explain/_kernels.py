"""A model of the least time of a Pallas kernel, which the TPU's compiler doesn't estimate.

The time is the larger of two: the kernel's matrix products at the chip's peak rate, and the bytes
that it reads and writes at the memory's rate. The work of the vector unit (attention's
exponentials), filling the matrix units, and moving blocks are left out, so a real kernel takes
longer.

- The author's count (`cost_estimate` of `pallas_call`) takes precedence over this model.
- Attention's products follow from shapes: with S scores, [heads x queries x keys], each product is
  2 x S x head dim operations. A forward has 2 products. In a backward of two kernels the one for
  queries has 3 and the one for keys and values 4, since both compute the scores again; a fused
  backward has 5.
- The time is that of padded head dims: a matrix unit is 128 (v6e, tpu7x: 256) wide, and a head dim
  of 64 leaves half of it idle. libtpu's own estimate of a batched product agrees.
- All scores count, unless the kernel was traced in a scope whose name has `causal` or a window:
  then blocks that these hide wholly don't. Splash attention gives its blocks in its name or, in
  newer JAX, beside it; for other kernels those scores count that are seen.
- For any other kernel only the bytes are known.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spmdzero.explain._chips import Chip
from spmdzero.hlo import Kernel, Operation, Shape

_ATTENTION = re.compile(r"attention|flash|splash|mha|mqa", re.IGNORECASE)
_FLOATS = ("bf16", "f16", "f32")
# Word in the kernel's name -> matrix products of one call; the first word found counts. Splash
# attention's name of a forward also has the blocks of its backward.
_PRODUCTS = (("fwd", 2), ("forward", 2), ("dkv", 4), ("dq", 3), ("backward", 5), ("bwd", 5))
_FORWARD, _FUSED_BACKWARD = 2, 5


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """The least cost of one call of a kernel.

    Attributes:
        flops: operations of its matrix products, without padding.
        seconds: seconds on one chip.
    """

    flops: float
    seconds: float


def kernel_cost(operation: Operation, chip: Chip) -> KernelCost:
    """The cost of a kernel by the model of this file; `operation` calls the kernel."""
    kernel = operation.kernel
    assert kernel is not None, operation.name
    moved = kernel.bytes_accessed or sum(s.bytes for s in (*kernel.operands, *kernel.results))
    if kernel.flops is not None:
        flops = padded = float(kernel.flops)
    else:
        flops, padded = _attention_flops(kernel, operation.op_names, chip.matrix_width)
    return KernelCost(flops=flops, seconds=max(padded / chip.bf16_flops, moved / chip.hbm_rate))


def _attention_flops(kernel: Kernel, op_names: Sequence[str], width: int) -> tuple[float, float]:
    """Operations of an attention kernel, without and with padding; zeros for other kernels."""
    said = " ".join((kernel.name, *op_names))
    arrays = [s for s in kernel.operands if s.dtype in _FLOATS and len(s.dims) > 2]
    if not _ATTENTION.search(said) or len(arrays) < 3:
        return 0.0, 0.0
    query, key, value = (array.dims for array in arrays[:3])
    scores = math.prod(query[:-1]) * key[-2]
    products = _products(kernel, said, arrays[0])
    window = re.search(r"\.window(\d+)", said)
    if "causal" in said or window:
        near = int(window[1]) if window else key[-2]
        blocks = _blocks(f"{said} {kernel.said}", products)
        scores *= _seen(query[-2], key[-2], *blocks, causal="causal" in said, window=near)
    # Half of the products contract or produce the queries' head dim, half the values' head dim.
    head = (query[-1] + value[-1]) / 2
    wide = (_padded(query[-1], width) + _padded(value[-1], width)) / 2
    return 2 * products * scores * head, 2 * products * scores * wide


def _blocks(said: str, products: int) -> tuple[int, int]:
    """Queries and keys in a block, by what a kernel says; 1 and 1 if it says nothing."""
    # The name has the blocks of all its kernels; so has the text that newer JAX writes beside it.
    which = {_FORWARD: "", 3: "_dq"}.get(products, "_dkv")
    found = [re.search(rf'block_{side}{which}(?:[=_]|": )(\d+)', said) for side in ("q", "kv")]
    q_block, kv_block = (int(one[1]) if one else 0 for one in found)
    return (q_block, kv_block) if q_block and kv_block else (1, 1)


def _seen(
    queries: int, keys: int, q_block: int, kv_block: int, *, causal: bool, window: int
) -> float:
    """The share of blocks that a causal mask and a window don't hide wholly."""
    seen = 0
    for start in range(0, queries, q_block):
        end = start + q_block
        first = max(start - window + 1, 0) // kv_block
        last = -(-min(end if causal else end + window - 1, keys) // kv_block)
        seen += max(last - first, 0)
    return seen / (-(-queries // q_block) * -(-keys // kv_block))


def _products(kernel: Kernel, said: str, query: Shape) -> int:
    found = next((count for word, count in _PRODUCTS if word in kernel.name), None)
    found = found or next((count for word, count in _PRODUCTS if word in said), _FORWARD)
    gradients = [s for s in kernel.results if s.dtype == query.dtype and len(s.dims) > 2]
    # A kernel for keys and values that also returns the queries' gradient is a fused one.
    return _FUSED_BACKWARD if found == 4 and len(gradients) > 2 else found


def _padded(length: int, width: int) -> int:
    return math.ceil(length / width) * width
