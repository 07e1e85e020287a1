"""`spmdzero doctor`: whether this machine is fit to train."""

from pathlib import Path
from typing import Annotated

import typer

from spmdzero.audit import doctor as diagnose


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page to this file")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with status 1 if there is a problem")
    ] = False,
) -> None:
    """Checks versions, devices, flags and memory."""
    diagnosis = diagnose()
    typer.echo(diagnosis.to_json() if as_json else str(diagnosis))
    if html is not None:
        html.write_text(diagnosis._repr_html_())
    if strict and diagnosis.problems:
        raise typer.Exit(1)
