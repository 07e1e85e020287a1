"""How a reduction combines, by DeepSpeed's names."""

import enum
from typing import Any

import torch.distributed as dist


class ReduceOp(enum.Enum):
    """DeepSpeed's reductions; torch's own `ReduceOp` is taken in their place too."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


def as_torch(op: Any) -> tuple[Any, bool]:
    """The operation that gloo knows, and whether its result is still to be divided (AVG)."""
    name = op.name if isinstance(op, ReduceOp) else str(op).rsplit(".", 1)[-1]
    if name == "AVG":
        return dist.ReduceOp.SUM, True
    return getattr(dist.ReduceOp, name), False
