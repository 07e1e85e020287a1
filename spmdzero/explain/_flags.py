"""The flags with which libtpu compiles a step for each topology."""

from collections.abc import Mapping, Sequence

from spmdzero.backend import flags
from spmdzero.explain._chips import Topology


def flags_on(topology: Topology, name: str) -> Mapping[str, str]:
    """Name -> value of each flag for the config's set `name`, with the backend's own flags."""
    return {**flags.ALWAYS, **flags.flags_for(name, chip=topology.chip.name)}


def flags_in_words(topologies: Sequence[Topology], name: str) -> tuple[str, ...]:
    """``name=value`` of each flag, followed by its topologies if not all have it."""
    if not topologies:
        # The flags of a named set are the same on every chip.
        chosen = {} if name == "auto" else flags.flags_for(name)
        return tuple(f"{key}={value}" for key, value in {**flags.ALWAYS, **chosen}.items())
    where: dict[str, list[str]] = {}
    for topology in topologies:
        for key, value in flags_on(topology, name).items():
            where.setdefault(f"{key}={value}", []).append(topology.name)
    return tuple(
        flag if len(names) == len(topologies) else f"{flag} ({', '.join(names)})"
        for flag, names in where.items()
    )
