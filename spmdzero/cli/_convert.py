"""`spmdzero convert`: converts a checkpoint to a different format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from spmdzero.cli._options import Source, Tag

if TYPE_CHECKING:
    from rich.progress import Progress

    from spmdzero.formats import Format


def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(help="the folder to write (for fp32 also a .bin)")],
    to: Annotated[str, typer.Option(help="native, universal, deepspeed, safetensors, dcp or fp32")],
    tag: Tag = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="deepspeed: the processes that will load it")
    ] = None,
    stage: Annotated[int, typer.Option(min=1, max=3, help="deepspeed: their ZeRO stage")] = 2,
    dtype: Annotated[
        str | None, typer.Option(help="safetensors, dcp: fp32, bf16 or fp16; as it is if left out")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="safetensors, fp32: of each file, such as 5GB or 500MiB")
    ] = "5GB",
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="leave out what no optimizer trained")
    ] = False,
) -> None:
    """Writes a checkpoint, ours or DeepSpeed's, in another format. No device is used."""
    from spmdzero.formats import Conversion, dtype_called
    from spmdzero.formats import convert as convert_checkpoint

    conversion = Conversion(
        to=cast("Format", to),
        ranks=ranks,
        stage=stage,
        dtype=dtype_called(dtype) if dtype is not None else None,
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen,
    )
    with _bar() as bar:
        task = bar.add_task(f"{tag or source.name} to {to}", total=None)
        written = convert_checkpoint(
            source,
            target,
            conversion,
            tag=tag,
            progress=lambda read, total: bar.update(task, advance=read, total=total),
        )
    typer.echo(written)


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    # The bar is drawn on stderr, as the command's output is the path of the written checkpoint.
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True))
