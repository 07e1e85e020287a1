"""How the compiler is asked: as `spmdzero explain` asks it."""

from typing import Any

from spmdzero.backend import flags
from spmdzero.explain import Topology, _aot


def request_of(topology: str) -> dict[str, Any]:
    """For a program that no config says more of."""
    chips = Topology.parse(topology)
    return {
        "topology": chips.slice_name,
        "slices": chips.slices,
        "cores": chips.chip.cores,
        "devices": chips.devices,
        "flags": {**_aot._LEAN, **flags.ALWAYS},
        "environment": dict(_aot._ENVIRONMENT),
    }
