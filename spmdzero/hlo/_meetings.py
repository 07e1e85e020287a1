"""The collectives between a program's hosts in order: the only places where hosts meet."""

import re

from spmdzero.hlo._groups import groups_in

_COLLECTIVE = re.compile(
    r"^.* = (?P<shapes>\S.*?) (?P<opcode>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute|collective-broadcast)(?:-start)?\(.*$",
    re.MULTILINE,
)
_NAME = re.compile(r'\bop_name="([^"]*)"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


def between_hosts(text: str, *, hosts: int) -> tuple[str, ...]:
    """A text for each collective over devices of several hosts, in the program's order.

    Programs that differ in these can't run together: a host would wait for a tensor that another
    one never sends, or take a different tensor for the one that it expects.

    Args:
        text: of an optimised, partitioned module. Only the lines of collectives are read, as
            parsing a program's whole text takes seconds.
        hosts: number of hosts, over which the devices are spread evenly, host after host.
    """
    found = _PARTITIONS.search(text[: text.find("\n")])
    devices = int(found[1]) if found else 1
    each = max(devices // hosts, 1)
    met = []
    for line in _COLLECTIVE.finditer(text):
        groups = groups_in(line[0]) or (tuple(range(devices)),)
        if any(len({device // each for device in group}) > 1 for group in groups):
            name = _NAME.search(line[0])
            said = line["opcode"], line["shapes"], str(groups), name[1] if name else ""
            met.append(" ".join(said))
    return tuple(met)
