"""`spmdzero inspect`: shows the content of a checkpoint."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from spmdzero.cli._options import AsJson, Source, Tag

if TYPE_CHECKING:
    from spmdzero.formats import CheckpointDescription


def inspect(
    source: Source,
    tag: Tag = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows what a checkpoint holds, ours or DeepSpeed's, and checks its files."""
    from spmdzero.formats import describe
    from spmdzero.show import Table

    found = describe(source, tag)
    if as_json:
        typer.echo(found.to_json())
        return
    for name, value in _rows(found):
        typer.echo(f"{name:13} {value}")
    if tensors:
        rows = [
            (t.name, "x".join(map(str, t.shape)) or "scalar", t.dtype, f"{t.bytes:,}")
            for t in found.tensors
        ]
        table = Table(headers=("tensor", "shape", "dtype", "bytes"), rows=rows, numbers=[3])
        typer.echo(table.text())


def _rows(found: "CheckpointDescription") -> Iterator[tuple[str, str]]:
    yield "path", found.path
    yield "format", found.format
    yield "counters", _pairs(found.counters)
    yield "updates", str(found.updates) if found.updates is not None else "not said"
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
    yield "parameters", f"{found.parameters} ({dtypes}), {found.elements:,} elements"
    yield "bytes", f"{found.bytes:,} ({_pairs(found.roles)})"
    for index, group in enumerate(found.groups):
        yield f"group {index}", _pairs(group)
    yield "loss scale", _pairs(found.scaler) if found.scaler else "none"
    yield "schedule", _pairs(found.scheduler) if found.scheduler else "none"
    yield "client state", ", ".join(found.client_state) or "none"


def _pairs(values: dict) -> str:
    return ", ".join(
        f"{key} {value:,}" if type(value) is int else f"{key} {value}"
        for key, value in values.items()
    )
