"""`spmdzero check`: tells how each key of a DeepSpeed JSON is treated."""

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from spmdzero.cli._options import AsJson
from spmdzero.config import ConfigReport, Refused, check_config

_WIDTH = 96


def check(
    config: Annotated[Path, typer.Argument(help="a DeepSpeed JSON")], as_json: AsJson = False
) -> None:
    """Sorts a DeepSpeed JSON's keys into honoured, without effect, refused. Uses no device."""
    found = check_config(config)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        typer.echo("\n".join(_lines(found, name=config.name)))
    if found.refused:
        raise typer.Exit(1)


def _lines(found: ConfigReport, *, name: str) -> Iterator[str]:
    honoured = len(found.honoured) + len(found.auto)
    yield (
        f"{name}: {len(found.refused)} refused, {len(found.without_effect)} without effect, "
        f"{honoured} honoured"
    )
    if found.refused:
        yield from ("", "Refused: training ends with these before it starts")
    said = set[str]()
    for refused in found.refused:
        yield from _refused(refused, said)
    if found.without_effect:
        yield from ("", "Without effect: they may stay")
    for key, why in found.without_effect.items():
        yield from _wrapped(f"· {key}: {why}")
    if found.auto:
        yield from ("", 'Honoured, and "auto": transformers\' Trainer writes the number')
        yield from _wrapped(f"✓ {', '.join(found.auto)}")
    if found.honoured:
        yield from ("", "Honoured")
        yield from _wrapped(f"✓ {_pairs(found.honoured)}")
    if found.unchecked:
        yield from ("", "Not checked: they belong to what is refused")
        yield from _wrapped(f"· {_pairs(found.unchecked)}")
    if found.notes:
        yield from ("", "The log of a run will say")
    for note in found.notes:
        yield from _wrapped(f"! {note}")


def _refused(refused: Refused, said: set[str]) -> Iterator[str]:
    yield f"✗ {refused.key} = {_short(refused.value)}"
    # Several keys of one feature have one reason and one way out, as unknown ones have one list.
    for text in (refused.reason, refused.fix):
        yield from _wrapped("    as above" if text in said else f"    {text}", more="    ")
    said |= {refused.reason, refused.fix}
    if refused.line:
        yield f"    write: {refused.line}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    return textwrap.shorten(json.dumps(value), 60, placeholder=" ...")


def _wrapped(text: str, *, more: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
    )
