"""What the devices really hold, read from the live shards."""

import torch

from spmdzero.engine import Engine
from spmdzero.plan import MemoryReport, Role
from spmdzero.xla import local_shards

_SLOT_ROLES = {"parameter": Role.PARAMETER, "accumulator": Role.ACCUMULATOR, "master": Role.MASTER}


def measure(engine: Engine) -> MemoryReport:
    """Bytes on the fullest device of this host, by role, of the engine's live tensors.

    The counterpart of `engine.plan.memory()`. GRADIENT is 0: between steps there is none.
    """
    totals = dict.fromkeys(Role, 0)
    for name, tensor in engine.named_tensors().items():
        slot = name.split("/", 1)[0]
        role = _SLOT_ROLES.get(slot, Role.MOMENT if slot in engine.plan.moments else None)
        if role is not None:
            totals[role] += max(_bytes(shard) for shard in local_shards(tensor))
    return MemoryReport(tuple(totals.items()))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
