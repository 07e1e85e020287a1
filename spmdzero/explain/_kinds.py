"""What an operation of a step is for, as far as its names tell."""

import re

from spmdzero.hlo import Operation

KINDS = (
    "attention", "matmul", "normalisation", "loss", "optimizer", "copies", "kernels", "wire",
    "other",
)  # fmt: skip
"""In the order in which they are shown."""

# Operations that only move data: of them no fusion is more than a copy in another layout.
_MOVES = frozenset(
    {
        "bitcast", "bitcast-convert", "broadcast", "concatenate", "constant", "copy", "copy-done",
        "copy-start", "dynamic-slice", "dynamic-update-slice", "fusion", "get-tuple-element", "pad",
        "parameter", "reshape", "slice", "slice-done", "slice-start", "transpose", "tuple",
    }
)  # fmt: skip
# What the region computes of attention, and what JAX traces in a scope of that name.
_SCOPE = r"(?:^|/)attention\.(?:for|back)ward\b|(?:^|[/(])(?:causal_)?attention\)*/"
# Products over a batch dim: of queries and keys, of weights and values.
_BATCHED = re.compile(rf"aten__(matmul|bmm|baddbmm|einsum)\b|{_SCOPE}")
_LOSS = re.compile(r"aten__\w*(_loss|log_softmax)|cross_?entropy", re.IGNORECASE)
# Of norms that are written out, such as RMSNorm, by the names that their modules have.
_NORM = re.compile(
    r"aten__\w*norm(_backward)?\b|\bmodule(?:_backward)?/(?:[^/]*\.)?(?:ln|\w*norm)[^/.]*\.\d+/",
    re.I,
)
_SOFTMAX = re.compile(rf"aten__\w*softmax|{_SCOPE}")
# What the boundary does: sums, the norm, the update, the new parameters.
_OPTIMIZER = re.compile(r"(?:^|/)zero\.(gradient|norm|update|direction|parameter)\b")
_BY_NAME = (
    ("loss", _LOSS),
    ("normalisation", _NORM),
    ("optimizer", _OPTIMIZER),
    ("attention", _SOFTMAX),
)


def kind_of(operation: Operation) -> str:
    """One of `KINDS`, but ``"wire"``: that is time spent waiting, whichever operation waits.

    A fusion that holds a matrix product is one, whatever else is fused into it: attention's where
    the product is batched. Another is what the first of its names says; its own stands first.
    """
    if operation.kernel is not None:
        return "kernels"
    if operation.products:
        # A loop's body may have lost the names of what it came from.
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
