"""Training states as files: the native checkpoint format, and the form that all formats share."""

from spmdzero.formats._boxes import Box, assemble, box_shape, box_slices, flat_boxes, whole_box
from spmdzero.formats._convert import (
    FORMATS,
    Conversion,
    Format,
    bytes_to_read,
    convert,
    fp32_weights,
    write_for_deepspeed,
)
from spmdzero.formats._describe import CheckpointDescription, describe
from spmdzero.formats._folder import (
    Retention,
    check_tag,
    complete_tags,
    newest_complete,
    read_latest,
)
from spmdzero.formats._locate import format_of, locate
from spmdzero.formats._native import read_native
from spmdzero.formats._open import latest_tag, open_state
from spmdzero.formats._saver import BackgroundSaver
from spmdzero.formats._state import HostState, StoredTensor, TrainingState
from spmdzero.formats._write import SaveOrder, held_for, save_native
from spmdzero.formats.export import Weights, dtype_called, save_whole

__all__ = [
    "FORMATS",
    "BackgroundSaver",
    "Box",
    "CheckpointDescription",
    "Conversion",
    "Format",
    "HostState",
    "Retention",
    "SaveOrder",
    "StoredTensor",
    "TrainingState",
    "Weights",
    "assemble",
    "box_shape",
    "box_slices",
    "bytes_to_read",
    "check_tag",
    "complete_tags",
    "convert",
    "describe",
    "dtype_called",
    "flat_boxes",
    "format_of",
    "fp32_weights",
    "held_for",
    "latest_tag",
    "locate",
    "newest_complete",
    "open_state",
    "read_latest",
    "read_native",
    "save_native",
    "save_whole",
    "whole_box",
    "write_for_deepspeed",
]
