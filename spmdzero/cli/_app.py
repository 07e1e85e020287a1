"""The command line: its commands, and the display of their errors.

torch takes seconds to import, so a command's file imports it, and modules that need it, only when
the command runs: help and commands without torch don't wait for it.
"""

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from spmdzero.cli._calibrate import calibrate
from spmdzero.cli._check import check
from spmdzero.cli._convert import convert
from spmdzero.cli._doctor import doctor
from spmdzero.cli._explain import explain
from spmdzero.cli._inspect import inspect
from spmdzero.cli._launch import launch
from spmdzero.cli._plan import plan
from spmdzero.cli._run import run
from spmdzero.errors import SpmdZeroError

app = typer.Typer(
    name="spmdzero",
    help="ZeRO as sharding annotations: see what the compilers make of a step, and what is in "
    "checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"spmdzero {importlib.metadata.version('spmdzero')}")
        raise typer.Exit


@app.callback()
def _spmdzero(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def _command(function: Callable[..., None]) -> None:
    @functools.wraps(function)
    def without_traceback(**options: object) -> None:
        try:
            function(**options)
        except SpmdZeroError as error:
            typer.echo(f"spmdzero {function.__name__}: {error}", err=True)
            raise typer.Exit(2) from error

    app.command()(without_traceback)


for _function in (check, explain, plan, calibrate, doctor, convert, inspect):
    _command(_function)
# Arguments and options after the script's name are the script's; so are its exceptions.
for _function in (run, launch):
    app.command(context_settings={"allow_interspersed_args": False})(_function)


def ds_report() -> None:
    """DeepSpeed's command of that name: `spmdzero doctor`."""
    app(["doctor", *sys.argv[1:]])
