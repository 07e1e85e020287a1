"""What all hosts do together, in one order: whether this one does what another does."""

import hashlib

CAME = "came to"
"""So begins what is said of a host that lives, and isn't where the others are."""
# What a host came to, of which it knows that many.
_REMEMBERED = 256

Place = tuple[int, str, str]
"""How many things a host came to, the latest of them, and a digest of all in their order."""
START: Place = (0, "", "")


class Joint:
    """Takes note of what this host came to.

    Attributes:
        latest: where it is.
    """

    def __init__(self) -> None:
        self.latest = START
        self._around = ""
        self._past: dict[int, tuple[str, str]] = {}

    def come_to(self, what: str, *, part: bool = False) -> None:
        """The next of them; one that is part of what came before is told with it."""
        if not part:
            self._around = what
        elif self._around:
            what = f"{what} after {self._around}"
        number, _, before = self.latest
        digest = hashlib.sha256(f"{before} {what}".encode()).hexdigest()[:8]
        number += 1
        self._past[number] = what, digest
        # One host may be ahead of another, as programs start before others have ended.
        self._past.pop(number - _REMEMBERED, None)
        self.latest = number, what, digest

    def apart(self, place: Place, *, here: str) -> str:
        """What is said of a host that does something else; nothing where it does the same.

        Args:
            place: where that host is, ahead or behind.
            here: this host, as the message names it.
        """
        number, theirs, digest = place
        mine, own = self._past.get(number, (theirs, digest))
        if mine != theirs:
            found = f"{CAME} {theirs}, {here} to {mine}: they never meet"
        elif own != digest:
            # What they exchanged was not the same, and neither has waited for the other.
            found = f"{CAME} {theirs} by another way than {here}"
        else:
            return ""
        return (
            f"{found}. Every host has to do the same, in one order; also to read what is not "
            "computed yet"
        )
