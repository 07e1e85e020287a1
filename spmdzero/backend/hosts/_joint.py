"""What all hosts do together, in one order: whether this one does what another does."""

import hashlib

CAME = "came to"
"""So begins what is said of a host that lives, and isn't where the others are."""
# What a host came to, of which it knows that many.
_REMEMBERED = 256

Place = tuple[int, str, str, str]
"""How many things a host came to, the latest, a digest of all in their order, and file and line of
the user's code that the latest is of; empty where none is known."""
START: Place = (0, "", "", "")
_CAUSE = (
    "The likely cause: something that only some hosts do, such as `if rank == 0: "
    "print(loss.item())`. Do it on every host, as in `value = loss.item()`, and print on one"
)


class Joint:
    """Takes note of what this host came to.

    Attributes:
        latest: where it is.
    """

    def __init__(self) -> None:
        self.latest = START
        self._around = ""
        self._past: dict[int, tuple[str, str, str]] = {}

    def come_to(self, what: str, *, part: bool = False, where: str = "") -> None:
        """The next of them; one that is part of what came before is told with it.

        Hosts that do the same in other lines of their scripts, of which `where` is one, do the
        same.
        """
        if not part:
            self._around = what
        elif self._around:
            what = f"{what} after {self._around}"
        number, _, before, _ = self.latest
        digest = hashlib.sha256(f"{before} {what}".encode()).hexdigest()[:8]
        number += 1
        self._past[number] = what, digest, where
        # One host may be ahead of another, as programs start before others have ended.
        self._past.pop(number - _REMEMBERED, None)
        self.latest = number, what, digest, where

    def apart(self, place: Place, *, here: str) -> str:
        """What is said of a host that does something else; nothing where it does the same.

        Args:
            place: where that host is, ahead or behind.
            here: this host, as the message names it.
        """
        number, theirs, digest, there = place
        mine, own, line = self._past.get(number, (theirs, digest, ""))
        if mine != theirs:
            found = f"{CAME} {theirs}{at(there)}, {here} to {mine}{at(line)}: they never meet"
        elif own != digest:
            # What they exchanged was not the same, and neither has waited for the other.
            found = f"{CAME} {theirs}{at(there)} by another way than {here}{at(line)}"
        else:
            return ""
        return (
            f"{found}. Every host has to do the same, in one order; also to read what is not "
            f"computed yet. {_CAUSE}"
        )


def at(where: str) -> str:
    """A line of the user's code, as it stands after what happens there."""
    return where and f" ({where})"
