"""Measures the bytes that the devices really hold, by the slices of the live tensors."""

import math

from spmdzero.backend import arrays, runtime
from spmdzero.engine import Engine
from spmdzero.plan import MemoryReport, Role

_SLOT_ROLES = {"parameter": Role.PARAMETER, "accumulator": Role.ACCUMULATOR, "master": Role.MASTER}


def measure(engine: Engine) -> MemoryReport:
    """Bytes on the fullest device of this host, by role, of the engine's live tensors.

    It is the counterpart of `engine.plan.memory()`. GRADIENT is 0, as there is no gradient between
    steps. No value is read from the devices: after the step the runtime tells each device's slice.
    """
    runtime.wait()
    totals, there = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for name, tensor in engine.named_tensors().items():
        slot = name.split("/", 1)[0]
        role = _SLOT_ROLES.get(slot, Role.MOMENT if engine.plan.is_slot(slot) else None)
        if role is not None:
            counted = there if arrays.are_on_host([tensor])[0] else totals
            size = max(map(math.prod, arrays.local_shapes(tensor))) * tensor.element_size()
            counted[role] += size
    return MemoryReport(tuple(totals.items()), tuple(there.items()) if any(there.values()) else ())
