"""`spmdzero run`: runs a script that imports `deepspeed`, or a client of it, on spmdzero."""

import os
from typing import Annotated

import typer

from spmdzero.errors import SpmdZeroUsageError


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
) -> None:
    """Runs a script in which `deepspeed` is spmdzero, for transformers and other clients too."""
    from spmdzero.backend.hosts.processes import name_a_process_that_is_surely_alone
    from spmdzero.integrations import install
    from spmdzero.integrations._as_main import run_as_main
    from spmdzero.integrations._children import know_deepspeed
    from spmdzero.integrations._rows_of_devices import VARIABLE

    if devices is not None:
        # The runtime reads these variables at the first question about devices.
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices))
    if rows_per_device:
        os.environ[VARIABLE] = "device"
    # Clients take LOCAL_RANK for the sign of a launcher, without which they refuse DeepSpeed.
    name_a_process_that_is_surely_alone()
    try:
        install()
        know_deepspeed()
        run_as_main(script, arguments or [], module=module)
    except SpmdZeroUsageError as error:
        typer.echo(f"spmdzero run: {error}", err=True)
        raise typer.Exit(2) from error
