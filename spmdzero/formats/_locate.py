"""From what a user points at to a folder of checkpoints and a tag in it."""

from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import deepspeed
from spmdzero.formats._manifest import COMMIT
from spmdzero.formats._open import latest_tag


def locate(source: Path, tag: str | None = None) -> tuple[Path, str]:
    """The folder of checkpoints and the tag that `source` means.

    Args:
        source: a folder of checkpoints, or the folder of one tag.
        tag: which of them; what `latest` says by default.

    Raises:
        SpmdZeroCheckpointError: there is nothing.
    """
    if tag is not None:
        return source, tag
    folder = source.resolve()
    if (folder / COMMIT).exists() or (folder.is_dir() and deepspeed.recognises(folder)):
        return folder.parent, folder.name
    tag = latest_tag(source)
    if tag is None:
        raise SpmdZeroCheckpointError(
            file=source,
            reason="is no folder of checkpoints, nor of one: there is no file `latest` in it",
            newest=None,
            fix="Name the folder that was passed to save_checkpoint, or a tag by --tag",
        )
    return source, tag


def format_of(path: Path) -> str:
    """``"native"``, ``"universal"`` or ``"deepspeed"``, of the folder of a tag."""
    if (path / COMMIT).exists() or not deepspeed.recognises(path):
        return "native"
    return "universal" if (path / "zero").is_dir() else "deepspeed"
