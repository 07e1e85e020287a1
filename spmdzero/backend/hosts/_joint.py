"""Joint operations, which all hosts do in one order: compares this host with others."""

import hashlib

CAME = "came to"
"""The word by which a message says that a live host is elsewhere than the others."""
# Number of latest operations that a host remembers.
_REMEMBERED = 256

Place = tuple[int, str, str, str]
"""A host's latest joint operation: the number of operations so far, the latest one's name, a digest
of all in order, and the file and line of the user's code of the latest, empty where unknown."""
START: Place = (0, "", "", "")
_CAUSE = (
    "The likely cause: something that only some hosts do, such as `if rank == 0: "
    "print(loss.item())`. Do it on every host, as in `value = loss.item()`, and print on one"
)


class Joint:
    """Records the joint operations of this host.

    Attributes:
        latest: the place that this host has reached.
    """

    def __init__(self) -> None:
        self.latest = START
        self._around = ""
        self._past: dict[int, tuple[str, str, str]] = {}

    def come_to(self, what: str, *, part: bool = False, where: str = "") -> None:
        """Records the next joint operation; a `part` of the one before is named together with it.

        `where` is the line of the user's code. It isn't compared: hosts may do the same on
        different lines.
        """
        if not part:
            self._around = what
        elif self._around:
            what = f"{what} after {self._around}"
        number, _, before, _ = self.latest
        digest = hashlib.sha256(f"{before} {what}".encode()).hexdigest()[:8]
        number += 1
        self._past[number] = what, digest, where
        # Hosts may be apart by some programs, which start before others have ended.
        self._past.pop(number - _REMEMBERED, None)
        self.latest = number, what, digest, where

    def apart(self, place: Place, *, here: str) -> str:
        """A message that another host does something else; empty where it does the same.

        Args:
            place: of the other host, ahead or behind.
            here: this host, as the message names it.
        """
        number, theirs, digest, there = place
        mine, own, line = self._past.get(number, (theirs, digest, ""))
        if mine != theirs:
            found = f"{CAME} {theirs}{at(there)}, {here} to {mine}{at(line)}: they never meet"
        elif own != digest:
            # The values that they exchanged differed, and neither host has waited for the other.
            found = f"{CAME} {theirs}{at(there)} by another way than {here}{at(line)}"
        else:
            return ""
        return (
            f"{found}. Every host has to do the same, in one order; also to read what is not "
            f"computed yet. {_CAUSE}"
        )


def at(where: str) -> str:
    """A line of the user's code in parentheses, as a suffix; empty if it isn't known."""
    return where and f" ({where})"
