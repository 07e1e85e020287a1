"""`spmdzero launch`: runs a script on several hosts, or in several processes that act as hosts."""

from typing import Annotated

import typer

from spmdzero.errors import SpmdZeroUsageError


def launch(
    script: Annotated[str, typer.Argument(help="a script; with -m the name of a module")],
    arguments: Annotated[list[str] | None, typer.Argument(help="the script's own")] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="run a module, as python -m does")
    ] = False,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="processes on this machine that stand for hosts")
    ] = None,
    devices_per_host: Annotated[
        int | None, typer.Option(min=1, help="virtual devices of the CPU for each of them")
    ] = None,
    hostfile: Annotated[
        str, typer.Option("-H", "--hostfile", help="hosts, as in `worker-0 slots=4`; by ssh")
    ] = "",
    include: Annotated[
        str, typer.Option("-i", "--include", help="of the hosts and devices: NAME[:SLOT,...][@...]")
    ] = "",
    exclude: Annotated[
        str, typer.Option("-e", "--exclude", help="all but these, in that form")
    ] = "",
    master_addr: Annotated[
        str, typer.Option("--master_addr", help="how the others reach the first host")
    ] = "",
    master_port: Annotated[
        int | None, typer.Option("--master_port", help="29500; on one machine a free one")
    ] = None,
    ssh_port: Annotated[int | None, typer.Option("--ssh_port", help="of ssh")] = None,
    launcher_args: Annotated[str, typer.Option("--launcher_args", help="more words for ssh")] = "",
    restarts: Annotated[
        int, typer.Option(min=0, help="how many times to start again after a failure that may pass")
    ] = 0,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="start again without a host that is gone")
    ] = False,
) -> None:
    """Runs a script on several hosts, one process each, and ends all when one fails."""
    from spmdzero.integrations.launcher import Line, Remote
    from spmdzero.integrations.launcher import launch as launch_job

    try:
        status = launch_job(
            Line(
                script=[*(["-m"] if module else []), script, *(arguments or [])],
                hosts=hosts,
                devices=devices_per_host,
                hostfile=hostfile,
                include=include,
                exclude=exclude,
                address=master_addr,
                port=master_port,
                remote=Remote(port=ssh_port, options=launcher_args),
                restarts=restarts,
                elastic=elastic,
            )
        )
    except SpmdZeroUsageError as error:
        typer.echo(f"spmdzero launch: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(status)
