"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text")]
Html = Annotated[Path | None, typer.Option(help="write a page to this file")]
Strict = Annotated[bool, typer.Option("--strict", help="exit with status 1 if there is a problem")]
Tag = Annotated[str | None, typer.Option(help="which checkpoint: `latest` if left out")]
Source = Annotated[Path, typer.Argument(help="a folder of checkpoints, or of one tag")]
