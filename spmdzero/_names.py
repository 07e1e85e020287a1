"""Formats names in messages, and reads tables of names."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence


def listed(names: Sequence[str], *, most: int) -> str:
    """The first `most` names, and the number of further ones; "" without names."""
    shown = ", ".join(names[:most])
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name, ignoring case; "" if no name is near."""
    by_lower = {option.lower(): option for option in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"Did you mean {by_lower[near[0]]!r}?" if near else ""


def covered(name: str, known: Iterable[str]) -> str | None:
    """The first of `known` that `name` is, a star in it being any number; None where none is.

    What a loop over equal blocks moves is named for all of them: ``blocks.*.up.weight``.
    """
    if "*" not in name:
        return name if name in known else None
    form = re.compile(re.escape(name).replace(r"\*", r"\d+"))
    return next((each for each in known if form.fullmatch(each)), None)


def in_common(names: Collection[str]) -> str:
    """The one name, or the form with stars that all `names` have; "" where there is none."""
    forms = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}
    return next(iter(names if len(names) == 1 else forms)) if len(forms) == 1 else ""


def dotted(words: str) -> Iterator[str]:
    """Yields the names of a text; a word with a colon is the prefix of the names after it.

    ``"a b: c d.e: f"`` gives ``a``, ``b.c`` and ``d.e.f``.
    """
    prefix = ""
    for word in words.split():
        if word.endswith(":"):
            prefix = f"{word[:-1]}."
        else:
            yield f"{prefix}{word}"
