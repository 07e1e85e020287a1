"""Writes the tables of docs/config.md that come from the code."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from spmdzero.config import NO_MEANING
from spmdzero.config._keys import REMOVED
from spmdzero.config._off import OFF_ONLY, OffSection, OffValue

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def rendered(page: str) -> str:
    """`page` with the content between each pair of markers made anew."""
    tables = {
        "no-meaning": _table(("key", "why"), ((f"`{k}`", why) for k, why in NO_MEANING.items())),
        "off": _table(
            ("key", "accepted value", "why", "what to do"),
            ((f"`{k}`", _accepted(r), r.reason, r.fix) for k, r in sorted(OFF_ONLY.items())),
        ),
        "removed": _table(("key", "why"), ((f"`{k}`", why) for k, why in REMOVED.items())),
    }
    for name, table in tables.items():
        pattern = rf"(<!-- begin {name}:[^\n]*-->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(pattern, rf"\g<1>{table}\g<2>", page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"docs/config.md has {count} regions {name!r}, there must be one")
    return page


def _accepted(rule: OffValue | OffSection) -> str:
    off = rule.off
    if isinstance(rule, OffSection) or isinstance(off, dict):
        return ", ".join(f"`{json.dumps(k)}: {json.dumps(v)}`" for k, v in off.items()) or "`{}`"
    return f"`{json.dumps(off)}`"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
