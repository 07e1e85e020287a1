"""Shows explanations as commands print them."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import typer

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
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    told = {"command": command, "config": config, "date": now}
    page = together(explanations, told=[(key, said) for key, said in told.items() if said])
    if as_json:
        typer.echo(json.dumps([json.loads(e.to_json()) for e in explanations], indent=2))
    else:
        typer.echo(page.text())
    if html is not None:
        html.write_text(page.document())
    for problem in (problem for e in explanations for problem in e.problems):
        typer.echo(f"problem: {problem}", err=True)
