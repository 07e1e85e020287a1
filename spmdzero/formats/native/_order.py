"""Where and how one checkpoint is saved."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdzero.formats._latest import check_tag


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a folder keeps, of those that `latest` named at some time.

    A tag saved with ``save_latest=False`` is the caller's own and never deleted.

    Attributes:
        last: as many of the newest; None keeps all.
        every: and those whose global step is a multiple of this.
    """

    last: int | None = None
    every: int | None = None


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """Where and how one checkpoint is saved; the same in every process but for `process`.

    Attributes:
        folder: of the checkpoints, which all processes see.
        tag: the checkpoint's own folder in it.
        nonce: 8 hexadecimal digits that no save before had.
        latest: whether `latest` shall name it.
        retention: which older ones are deleted afterwards.
        description: what the manifest says of the run: versions, config, plan, mesh, counters.
        process, processes: which of the saving processes this is.

    Raises:
        SpmdZeroUsageError: the tag is no name of a folder.
    """

    folder: Path
    tag: str
    nonce: str
    latest: bool
    retention: Retention
    description: Mapping[str, Any]
    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        check_tag(self.tag)

    @property
    def path(self) -> Path:
        """The tag's folder."""
        return self.folder / self.tag
