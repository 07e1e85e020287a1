"""What the hosts of a program do together, in its order: elsewhere they don't meet."""

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
    """Of each collective over devices of several hosts what it is, in the program's order.

    Two programs that differ here can't run together: a host would wait for what the other never
    sends, or take another tensor for the one that it asks for.

    Args:
        text: of an optimised, partitioned module. Only the lines of collectives are read, as a
            program's whole text takes seconds to parse.
        hosts: over which the devices are spread evenly, one host's after another's.
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
