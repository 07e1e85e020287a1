"""Training states as files: spmdzero's own format, DeepSpeed's, and those of other programs."""

from spmdzero.formats._boxes import (
    Box,
    assemble,
    box_shape,
    box_slices,
    flat_boxes,
    meet,
    whole_box,
)
from spmdzero.formats._convert import (
    FORMATS,
    Conversion,
    Format,
    convert,
    fp32_weights,
    write_for_deepspeed,
)
from spmdzero.formats._describe import CheckpointDescription, describe
from spmdzero.formats._eight_bits import in_eight_bits
from spmdzero.formats._files import save_torch
from spmdzero.formats._latest import check_tag
from spmdzero.formats._open import format_of, latest_tag, locate, naming_the_newest, open_state
from spmdzero.formats._state import RESET_AT, HostState, StoredTensor, TrainingState
from spmdzero.formats._trees import portable
from spmdzero.formats.deepspeed import Split, TensorParallel
from spmdzero.formats.export import Weights, dtype_called
from spmdzero.formats.native import (
    BackgroundSaver,
    Retention,
    SaveOrder,
    complete_tags,
    held_for,
    host_bytes,
    host_from,
    newest_complete,
    save_native,
)

__all__ = [
    "FORMATS",
    "RESET_AT",
    "BackgroundSaver",
    "Box",
    "CheckpointDescription",
    "Conversion",
    "Format",
    "HostState",
    "Retention",
    "SaveOrder",
    "Split",
    "StoredTensor",
    "TensorParallel",
    "TrainingState",
    "Weights",
    "assemble",
    "box_shape",
    "box_slices",
    "check_tag",
    "complete_tags",
    "convert",
    "describe",
    "dtype_called",
    "flat_boxes",
    "format_of",
    "fp32_weights",
    "held_for",
    "host_bytes",
    "host_from",
    "in_eight_bits",
    "latest_tag",
    "locate",
    "meet",
    "naming_the_newest",
    "newest_complete",
    "open_state",
    "portable",
    "save_native",
    "save_torch",
    "whole_box",
    "write_for_deepspeed",
]
