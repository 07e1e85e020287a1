"""`spmdzero plan`: finds the JSON with which a model trains fastest on a slice."""

from pathlib import Path
from typing import Annotated

import typer

from spmdzero.cli._options import AsJson, Html
from spmdzero.cli._settings import changes
from spmdzero.errors import SpmdZeroUsageError


def plan(
    model: Annotated[str, typer.Argument(help="module:function that returns the model")],
    config: Annotated[Path, typer.Argument(help="a DeepSpeed JSON; what it names is kept")],
    batch: Annotated[
        list[str],
        typer.Option(
            "--batch",
            "-b",
            help="a shape, such as x=8x1024:int64, once for each input; or module:function. Its "
            "rows are a step's, unless --global-batch or the JSON says otherwise",
        ),
    ],
    tpu: Annotated[
        list[str],
        typer.Option(help="a topology, such as v5e:2x4 or v5litepod-8; again for more"),
    ],
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="rows of a step on all devices")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="tokens of the whole run, such as 2e12: its time and price")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(help="a chip's price for an hour, such as v6e=2.7; again for more"),
    ] = None,
    programs: Annotated[
        int, typer.Option(min=1, help="the most programs to compile for each slice")
    ] = 8,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help='a key of the JSON and its value; "auto" has it searched'),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="write the JSON to use, of the best slice, to this file")
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Finds the JSON with which a model trains fastest on a slice. No TPU needed."""
    prices = _prices(price or [])

    from spmdzero.cli._plan_job import Search

    search = Search(model=model, config=config, settings=changes(setting or []), batch=batch,
                    tpu=tpu, global_batch=global_batch, tokens=tokens, prices=prices,
                    programs=programs)  # fmt: skip
    if not search.run(as_json=as_json, html=html, write=write):
        raise typer.Exit(1)


def _prices(said: list[str]) -> dict[str, float]:
    """Generation -> the price of a chip for an hour."""
    found = {}
    for text in said:
        name, equals, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            equals = ""
        if not equals or not name or found[name] <= 0:
            raise SpmdZeroUsageError(
                f"--price {text}: write a generation and a chip's price for an hour, such as "
                "v6e=2.7"
            )
    return found
