"""The hosts and devices that a launcher's command line names, and this host's rank."""

import argparse
import dataclasses
import logging
import os
import re
from collections.abc import Mapping

from spmdzero.errors import SpmdZeroUsageError

_ROW = re.compile(r"(\S+)\s+slots=(\d+)")
logger = logging.getLogger("spmdzero")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a host in a job.

    Attributes:
        rank: rank of this host.
        hosts: number of hosts.
        address: MASTER_ADDR.
        devices: number of devices that the line asks for on this host; None if it doesn't say.
        chosen: whether the line names these devices one by one.
    """

    rank: int
    hosts: int
    address: str
    devices: int | None
    chosen: bool


def place_of(options: argparse.Namespace, *, virtual_devices: int) -> Place:
    """This host's place, reading the options as DeepSpeed does (launcher/runner.py, `main`).

    Args:
        options: the parsed options of the command line.
        virtual_devices: number of this host's devices if there is no hostfile; --exclude removes
            some of them.

    Raises:
        SpmdZeroUsageError: contradicting options, a hostfile that can't be read, or several hosts
            without --no_ssh: this launcher starts no process on other hosts.
    """
    if max(options.num_nodes, options.num_gpus) >= 0 and (options.include or options.exclude):
        raise SpmdZeroUsageError("--num_nodes and --num_gpus exclude --include and --exclude")
    pool = read_hostfile(options.hostfile)
    if pool is None and options.num_nodes > 1:
        raise SpmdZeroUsageError(
            f"--num_nodes {options.num_nodes}: no hostfile says which. {_by_itself(options)}"
        )
    known = pool or {"localhost": virtual_devices}
    slots = filtered(known, include=options.include, exclude=options.exclude)
    if options.num_nodes > 0:
        slots = dict(list(slots.items())[: options.num_nodes])
    if len(slots) > 1 and not options.no_ssh:
        raise SpmdZeroUsageError(
            f"{', '.join(slots)} are {len(slots)} hosts, and this starts one process, on this one. "
            f"{_by_itself(options)}"
        )
    rank = options.node_rank if options.no_ssh else 0
    if not 0 <= rank < len(slots):
        raise SpmdZeroUsageError(f"--no_ssh: --node_rank must be one of 0 to {len(slots) - 1}")
    first, mine = next(iter(slots)), list(slots)[rank]
    asked = options.num_gpus if options.num_gpus > 0 else len(slots[mine])
    return Place(
        rank=rank,
        hosts=len(slots),
        address=options.master_addr or ("127.0.0.1" if len(slots) == 1 else first),
        devices=asked if pool or options.num_gpus > 0 or slots != _all(known) else None,
        chosen=slots[mine] != list(range(known[mine])),
    )


def _by_itself(options: argparse.Namespace) -> str:
    return (
        f"On Cloud TPU run `deepspeed {options.user_script}` on every host, by `gcloud compute "
        "tpus tpu-vm ssh NAME --worker=all --command=...`: the TPU runtime connects them. "
        "Elsewhere run the line on every host, with --no_ssh, --node_rank and --master_addr"
    )


def read_hostfile(path: str) -> dict[str, int] | None:
    """Host -> number of slots in a hostfile; None if there is no such file.

    Raises:
        SpmdZeroUsageError: it has a malformed line, a host twice, an option as name, or no host.
    """
    if not os.path.isfile(path):
        if path != "/job/hostfile":
            logger.warning("--hostfile %s: there is no such file; this host is the only one", path)
        return None
    found: dict[str, int] = {}
    with open(path) as lines:
        for line in filter(None, (line.strip() for line in lines)):
            if line.startswith("#"):
                continue
            row = _ROW.match(line)
            if row is None or row[1] in found:
                why = "write `NAME slots=NUMBER`" if row is None else "this host is there already"
                raise SpmdZeroUsageError(f"--hostfile {path}: {line!r}: {why}")
            if row[1].startswith("-"):
                raise SpmdZeroUsageError(
                    f"--hostfile {path}: {line!r}: no host's name begins with a dash, which ssh "
                    "reads as an option of its own"
                )
            found[row[1]] = int(row[2])
    if not found:
        raise SpmdZeroUsageError(f"--hostfile {path}: names no host. Write `NAME slots=NUMBER`")
    return found


def _all(known: Mapping[str, int]) -> dict[str, list[int]]:
    return {host: list(range(count)) for host, count in known.items()}


def filtered(known: Mapping[str, int], *, include: str, exclude: str) -> dict[str, list[int]]:
    """Host -> remaining slots, by DeepSpeed's filters ``NAME[:SLOT[,SLOT...]][@NAME...]``.

    Raises:
        SpmdZeroUsageError: both filters are given, one is malformed, a host or slot is unknown, or
            no slot remains.
    """
    everything = _all(known)
    if include and exclude:
        raise SpmdZeroUsageError("--include and --exclude exclude each other: write one of them")
    if not include and not exclude:
        return everything
    named = _named(include or exclude)
    for host, slots in named.items():
        if host not in known or not set(slots) <= set(everything[host]):
            have = ", ".join(f"{name} with {count} slots" for name, count in known.items())
            raise SpmdZeroUsageError(f"{include or exclude!r} names what isn't there: {have}")
    if include:
        # In the order of the hostfile, as in DeepSpeed.
        left = {host: named[host] or everything[host] for host in known if host in named}
    else:
        gone = {host: slots or everything[host] for host, slots in named.items()}
        left = {
            host: [slot for slot in slots if slot not in gone.get(host, ())]
            for host, slots in everything.items()
        }
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise SpmdZeroUsageError(f"--exclude {exclude!r} leaves no device")
    return left


def _named(text: str) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for node in text.split("@"):
        host, colon, slots = node.partition(":")
        numbers = slots.split(",") if colon else []
        if not host or not all(number.isdecimal() for number in numbers):
            raise SpmdZeroUsageError(f"{text!r}: write NAME[:SLOT,SLOT...][@NAME...]")
        found.setdefault(host, set()).update(map(int, numbers))
    return {host: sorted(slots) for host, slots in found.items()}
