"""The command line: its commands, and how their errors are shown."""

import typer

from spmdzero.cli._convert import convert
from spmdzero.cli._doctor import doctor
from spmdzero.cli._explain import explain
from spmdzero.cli._inspect import inspect

app = typer.Typer(
    name="spmdzero",
    help="ZeRO as sharding annotations: see what the compilers make of a step, and what is in "
    "checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(explain)
app.command()(doctor)
app.command()(convert)
app.command()(inspect)
