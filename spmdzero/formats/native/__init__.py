"""spmdzero's own checkpoint format: each process writes its part, and a commit file vouches."""

from spmdzero.formats.native._folder import complete_tags, is_foreign, newest_complete
from spmdzero.formats.native._host_file import host_bytes, host_from
from spmdzero.formats.native._manifest import COMMIT
from spmdzero.formats.native._order import Retention, SaveOrder
from spmdzero.formats.native._read import read_native
from spmdzero.formats.native._saver import BackgroundSaver
from spmdzero.formats.native._write import held_for, save_native

__all__ = [
    "COMMIT",
    "BackgroundSaver",
    "Retention",
    "SaveOrder",
    "complete_tags",
    "held_for",
    "host_bytes",
    "host_from",
    "is_foreign",
    "newest_complete",
    "read_native",
    "save_native",
]
