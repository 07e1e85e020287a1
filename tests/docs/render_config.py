"""Writes the tables of docs/config.md that come from the code."""

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from param_meanings import MEANINGS
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spmdzero.config import NO_MEANING, OPTIMIZERS, SCHEDULES, Section
from spmdzero.config._deprecated import DEPRECATED, SECOND_SPELLINGS
from spmdzero.config._ignored import IGNORING
from spmdzero.config._keys import REMOVED
from spmdzero.config._models import SECTIONS
from spmdzero.config._must_be_off import OFF_ONLY, OffSection, OffValue

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def rendered(page: str) -> str:
    """`page` with the content between each pair of markers made anew."""
    ours = {at: model for at, model in SECTIONS.items() if at == "spmd"}
    honoured = {at: model for at, model in SECTIONS.items() if at not in ours}
    tables = {
        "ignoring": f"{', '.join(f'`{section}`' for section in IGNORING)}.\n",
        "honoured": _table(("key", "default", "meaning"), _honoured(honoured)),
        "params": _params("optimizer", OPTIMIZERS) + _params("scheduler", SCHEDULES),
        "spmd": _table(("key", "default", "meaning"), _honoured(ours)),
        "no-meaning": _table(("key", "why"), ((f"`{k}`", why) for k, why in NO_MEANING.items())),
        "off": _table(
            ("key", "accepted value", "why", "what to do", "what else may be in it"),
            (
                (f"`{k}`", _accepted(r), r.reason, r.fix, _idle(r))
                for k, r in sorted(OFF_ONLY.items())
            ),
        ),
        "removed": _table(("key", "why"), ((f"`{k}`", why) for k, why in REMOVED.items())),
        "spellings": _table(
            ("spelling", "read as", "with a warning"),
            (
                (f"`{old}`", f"`{new}`", "yes" if old in DEPRECATED else "no")
                for old, new in {**DEPRECATED, **SECOND_SPELLINGS}.items()
            ),
        ),
    }
    for name, table in tables.items():
        pattern = rf"(<!-- begin {name}:[^\n]*-->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(
            pattern,
            lambda found, table=table: found[1] + table + found[2],
            page,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"docs/config.md has {count} regions {name!r}, there must be one")
    return page


def written(field: FieldInfo) -> str:
    """A field's default as in JSON, or "required"."""
    value = field.get_default(call_default_factory=True)
    return "required" if value is PydanticUndefined else f"`{json.dumps(value)}`"


def _honoured(sections: dict[str, type[Section]]) -> Iterator[tuple[str, str, str]]:
    for at, model in sections.items():
        meanings = _meanings(model)
        for name, field in model.model_fields.items():
            key = f"{at}.{field.alias or name}".lstrip(".")
            if key not in {*SECTIONS, *NO_MEANING, *OFF_ONLY}:
                yield f"`{key}`", written(field), meanings[name]


def _params(section: str, models: dict[str, type[Section]]) -> str:
    names: dict[type[Section], list[str]] = {}
    for name, model in models.items():
        names.setdefault(model, []).append(name)
    parts = []
    for model, group in names.items():
        rows = (
            (f"`{name}`", written(field), MEANINGS[name])
            for name, field in model.model_fields.items()
        )
        title = f"### `{section}.params` of {' and '.join(group)}"
        parts.append(f"\n{title}\n\n{_table(('key', 'default', 'meaning'), rows)}")
    return "".join(parts)


def _meanings(model: type[Section]) -> dict[str, str]:
    """What the docstring of a section says about each attribute."""
    _, _, attributes = inspect.cleandoc(model.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.*\n?(?: {8}.*\n?)*)", attributes, re.MULTILINE)
    as_page = {"``": "`", "None": "null"}
    for python, page in as_page.items():
        entries = [(name, text.replace(python, page)) for name, text in entries]
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def _accepted(rule: OffValue | OffSection) -> str:
    if isinstance(rule, OffSection):
        return ", ".join(f"`{json.dumps(k)}: {_choice(v)}`" for k, v in rule.off.items())
    return f"`{_choice(rule.off)}`"


def _choice(off: object) -> str:
    return "` or `".join(map(json.dumps, off if isinstance(off, tuple) else (off,)))


def _idle(rule: OffValue | OffSection) -> str:
    names = rule.idle if isinstance(rule, OffSection) else ()
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
