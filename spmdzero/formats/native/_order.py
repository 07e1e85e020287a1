"""The place and the settings of one save."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdzero.formats._latest import check_tag


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The checkpoints that a folder keeps, of those that `latest` named at some time.

    A tag saved with ``save_latest=False`` belongs to the caller and is never deleted.

    Attributes:
        last: number of the newest ones to keep; None keeps all.
        every: also keep those whose global step is a multiple of this.
    """

    last: int | None = None
    every: int | None = None


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """The place and the settings of one save, the same in every process except `process`.

    Attributes:
        folder: of the checkpoints, which all processes see.
        tag: the checkpoint's own folder in it.
        nonce: 8 hexadecimal digits that no earlier save had.
        latest: whether `latest` shall name it.
        retention: the older checkpoints that are kept afterwards.
        description: the manifest's facts about the run: versions, config, plan, mesh, counters.
        process, processes: index of this saving process, and their number.

    Raises:
        SpmdZeroUsageError: `tag` can't name a checkpoint.
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
