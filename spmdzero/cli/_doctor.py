"""`spmdzero doctor`: checks whether this machine can train."""

import typer

from spmdzero._display import page_of
from spmdzero.cli._options import AsJson, Html, Strict


def doctor(as_json: AsJson = False, html: Html = None, strict: Strict = False) -> None:
    """Checks backend, versions, devices, flags and memory."""
    from spmdzero.audit import doctor as diagnose

    diagnosis = diagnose()
    typer.echo(diagnosis.to_json() if as_json else str(diagnosis))
    if html is not None:
        html.write_text(page_of(diagnosis).document())
    if strict and diagnosis.problems:
        raise typer.Exit(1)
