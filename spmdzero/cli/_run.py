"""`spmdzero run`: runs a script that imports `deepspeed`, or a client of it, on spmdzero."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spmdzero.cli._options import Html
from spmdzero.errors import SpmdZeroUsageError

if TYPE_CHECKING:
    from spmdzero.explain import Topology


def run(
    script: Annotated[
        str, typer.Argument(help="a script or a command in Python; with -m the name of a module")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="the script's own")] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="run a module, as python -m does")
    ] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, help="run on that many virtual devices of the CPU")
    ] = None,
    rows_per_device: Annotated[
        bool,
        typer.Option(
            "--rows-per-device",
            help="a client's batch sizes count the rows of each device, as on GPUs, and not those "
            "of the process",
        ),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="SLICE",
            help="train nothing: tell what the TPU's compiler makes of the script's first step on "
            "v5e:2x4, v6e-8, ...",
        ),
    ] = None,
    html: Html = None,
) -> None:
    """Runs a script in which `deepspeed` is spmdzero, for transformers and other clients too."""
    from spmdzero.backend.hosts.processes import name_a_process_that_is_surely_alone
    from spmdzero.integrations import install
    from spmdzero.integrations._as_main import run_as_main
    from spmdzero.integrations._children import know_deepspeed
    from spmdzero.integrations._rows_of_devices import VARIABLE

    try:
        topology = _topology(explain, devices, html)
        devices = devices if topology is None else topology.devices
        if devices is not None:
            # The runtime reads these variables at the first question about devices.
            os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices))
        if rows_per_device:
            os.environ[VARIABLE] = "device"
        # Clients take LOCAL_RANK for the sign of a launcher, without which they refuse DeepSpeed.
        name_a_process_that_is_surely_alone()
        install()
        know_deepspeed()
        with contextlib.nullcontext() if topology is None else _explained(topology, html):
            run_as_main(script, arguments or [], module=module)
    except SpmdZeroUsageError as error:
        typer.echo(f"spmdzero run: {error}", err=True)
        raise typer.Exit(2) from error


def _topology(name: str | None, devices: int | None, html: Path | None) -> "Topology | None":
    """The slice that a script's step is explained for; None if it is run.

    Raises:
        SpmdZeroUsageError: there is no such slice, or another option has no sense with it.
    """
    if name is None:
        if html is not None:
            raise SpmdZeroUsageError(
                "--html: the page of an explanation, and --explain names no slice for one"
            )
        return None
    from spmdzero.explain import Topology

    topology = Topology.parse(name)
    if devices not in (None, topology.devices):
        raise SpmdZeroUsageError(
            f"--devices {devices}: {name} has {topology.devices}. Leave --devices out"
        )
    return topology


@contextlib.contextmanager
def _explained(topology: "Topology", html: Path | None) -> Iterator[None]:
    """Context in which a script runs until its first step, which is then explained and printed."""
    from spmdzero.cli._shown import show
    from spmdzero.integrations._explained_run import explaining

    # The script gets arguments of its own.
    command = shlex.join(["spmdzero", *sys.argv[1:]])
    with explaining(topology) as explanations:
        yield
    show(explanations, command=command, html=html)
