"""Comparing values that must be the same on all hosts, before anything depends on them."""

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence

from spmdzero._names import listed
from spmdzero.backend._current import runtime
from spmdzero.backend.hosts.processes import gather_objects
from spmdzero.errors import HostsDifferError

_MISSING = "nothing"
_SHOWN = 6
_NAMED = 3


def require_agreement(
    what: str, own: Mapping[str, str], *, fix: str, digests: bool = False
) -> None:
    """Checks that every host has the same values; each host must call it.

    Args:
        what: describes the values, such as ``"the config"``.
        own: this host's values, by names that an error can show.
        fix: tells the user what to do about a difference.
        digests: whether the values are checksums, which tell a reader nothing.

    Raises:
        HostsDifferError: the same on every host; it names hosts and differences.
    """
    if runtime.process_count() == 1:
        return
    # A thousand hosts that agree exchange a short digest each, the values only if they differ.
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()
    if len(set(gather_objects(digest))) == 1:
        return
    found = gather_objects((socket.gethostname(), dict(own)))
    differences = list(_other_names(found) if digests else _differences(found))
    if differences:
        more = len(differences) - _SHOWN
        shown = "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise HostsDifferError(f"the hosts don't agree on {what}: {shown}. {fix}")


def _other_names(found: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    (first_name, first), *others = found
    for host, (name, theirs) in enumerate(others, 1):
        names = [
            key for key in dict.fromkeys((*first, *theirs)) if first.get(key) != theirs.get(key)
        ]
        if names:
            shown = listed(names, most=_NAMED)
            verb = "differs" if len(names) == 1 else "differ"
            yield f"{shown} {verb} between host 0 ({first_name}) and host {host} ({name})"


def _differences(found: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    (first_name, first), *others = found
    for host, (name, theirs) in enumerate(others, 1):
        for key in dict.fromkeys((*first, *theirs)):
            here, there = first.get(key, _MISSING), theirs.get(key, _MISSING)
            if here != there:
                yield f"{key}: {here} on host 0 ({first_name}), {there} on host {host} ({name})"
