"""Shows explanations as commands print them."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import typer

from spmdzero._display import Page
from spmdzero._document import Document
from spmdzero.explain import Explanation
from spmdzero.show import together


def show(
    explanations: Sequence[Explanation],
    *,
    command: str,
    config: str | None = None,
    as_json: bool = False,
    html: Path | None = None,
) -> None:
    """Prints explanations, their problems on stderr, and writes a page of them.

    Args:
        explanations: what is shown.
        command, config: what was asked, for the head of the page.
        as_json: prints JSON instead of text.
        html: the page's file; None for none.
    """
    page = together(explanations, told=told(command, config))
    put_out(page, explanations, as_json=as_json, html=html)
    for problem in (problem for e in explanations for problem in e.problems):
        typer.echo(f"problem: {problem}", err=True)


def told(command: str, config: str | None) -> list[tuple[str, str]]:
    """Facts that only a command knows, as name and text, for the head of a page."""
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    facts = {"command": command, "config": config, "date": now}
    return [(key, said) for key, said in facts.items() if said]


def put_out(page: Page, found: Sequence[Document], *, as_json: bool, html: Path | None) -> None:
    """Prints a page, or the JSON of what it shows, and writes it to a file.

    Args:
        page: the page.
        found: what it shows.
        as_json, html: see `show`.
    """
    if as_json:
        typer.echo(json.dumps([json.loads(each.to_json()) for each in found], indent=2))
    else:
        typer.echo(page.text())
    if html is not None:
        html.write_text(page.document())
