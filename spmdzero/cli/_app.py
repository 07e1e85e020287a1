"""The command line: its commands, and how their errors are shown."""

import typer

from spmdzero.cli._doctor import doctor
from spmdzero.cli._explain import explain

app = typer.Typer(
    name="spmdzero",
    help="ZeRO as sharding annotations: see what the compilers make of a step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(explain)
app.command()(doctor)
