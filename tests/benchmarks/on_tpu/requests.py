"""How the compiler is asked: as `spmdzero explain` asks it."""

from typing import Any

from spmdzero.backend import flags as flag_sets
from spmdzero.explain import Topology, _aot


def request_of(topology: str, *, flags: bool) -> dict[str, Any]:
    """For a program that no config says more of, with spmdzero's flags for the chip or without."""
    chips = Topology.parse(topology)
    return {
        "topology": chips.slice_name,
        "slices": chips.slices,
        "cores": chips.chip.cores,
        "devices": chips.devices,
        "flags": {
            **_aot._LEAN,
            **flag_sets.ALWAYS,
            **(flag_sets.flags_for(chips.chip.name) if flags else {}),
        },
        "stablehlo": True,
        "input_shardings": {},
        "environment": dict(_aot._ENVIRONMENT),
    }
