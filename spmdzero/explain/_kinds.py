"""The purpose of an operation of a step, according to its names."""

import re

from spmdzero.hlo import Operation

KINDS = (
    "attention", "matmul", "normalisation", "loss", "optimizer", "copies", "kernels", "wire",
    "host", "other",
)  # fmt: skip
"""The kinds of operations, in the order in which they are shown."""

# Operations that only move data: a fusion of them is only a copy in a different layout.
_MOVES = frozenset(
    {
        "bitcast", "bitcast-convert", "broadcast", "concatenate", "constant", "copy", "copy-done",
        "copy-start", "dynamic-slice", "dynamic-update-slice", "fusion", "get-tuple-element", "pad",
        "parameter", "reshape", "slice", "slice-done", "slice-start", "transpose", "tuple",
    }
)  # fmt: skip
# The region's operations of attention, and those that JAX traces in a scope of that name.
_SCOPE = r"(?:^|/)attention\.(?:for|back)ward\b|(?:^|[/(])(?:causal_)?attention\)*/"
# Products over a batch dim: queries times keys, and weights times values.
_BATCHED = re.compile(rf"aten__(matmul|bmm|baddbmm|einsum)\b|{_SCOPE}")
_LOSS = re.compile(r"aten__\w*(_loss|log_softmax)|cross_?entropy", re.IGNORECASE)
# Norms, also ones written in Python such as RMSNorm, which are found by their modules' names.
_NORM = re.compile(
    r"aten__\w*norm(_backward)?\b|\bmodule(?:_backward)?/(?:[^/]*\.)?(?:ln|\w*norm)[^/.]*\.\d+/",
    re.I,
)
_SOFTMAX = re.compile(rf"aten__\w*softmax|{_SCOPE}")
# The boundary's operations: sums, the norm, the update, the new parameters.
_OPTIMIZER = re.compile(r"(?:^|/)zero\.(gradient|norm|update|direction|parameter)\b")
_BY_NAME = (
    ("loss", _LOSS),
    ("normalisation", _NORM),
    ("optimizer", _OPTIMIZER),
    ("attention", _SOFTMAX),
)


def kind_of(operation: Operation) -> str:
    """One of `KINDS` except ``"wire"`` and ``"host"``, the time that any operation waits for them.

    A fusion with a matrix product counts as that product, even if more is fused into it; a batched
    product is attention's. The first name that tells a kind decides about other operations; the
    operation's own name comes first.
    """
    if operation.kernel is not None:
        return "kernels"
    if operation.products:
        # A loop's body may have lost the names of the operations that it came from.
        unnamed = not any("aten__" in name for name in operation.products)
        batched = operation.batched and unnamed
        return "attention" if batched or any(map(_BATCHED.search, operation.products)) else "matmul"
    if operation.opcodes <= _MOVES:
        return "copies"
    for name in operation.op_names:
        for kind, pattern in _BY_NAME:
            if pattern.search(name):
                return kind
    return "other"
