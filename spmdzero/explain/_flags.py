"""The flags that libtpu compiles a step with, on each topology."""

from collections.abc import Mapping, Sequence

from spmdzero.backend import flags
from spmdzero.explain._chips import Topology


def flags_on(topology: Topology, name: str) -> Mapping[str, str]:
    """Name -> value, where the config's set of flags is `name`; the backend's own among them."""
    return {**flags.ALWAYS, **flags.flags_for(name, chip=topology.chip.name)}


def flags_in_words(topologies: Sequence[Topology], name: str) -> tuple[str, ...]:
    """``name=value`` of each flag, with the topologies behind it where not all have it."""
    if not topologies:
        # Those of a set that is named are the same on every chip.
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
