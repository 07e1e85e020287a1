"""Training states as files: the native checkpoint format, and the form that all formats share."""

from spmdzero.store._boxes import Box, assemble, box_shape, box_slices, flat_boxes, whole_box
from spmdzero.store._folder import Retention, check_tag, complete_tags, read_latest
from spmdzero.store._native import newest_good, read_native
from spmdzero.store._open import latest_tag, open_state
from spmdzero.store._saver import BackgroundSaver
from spmdzero.store._state import HostState, StoredTensor, TrainingState, in_memory
from spmdzero.store._write import SaveOrder, save_native

__all__ = [
    "BackgroundSaver",
    "Box",
    "HostState",
    "Retention",
    "SaveOrder",
    "StoredTensor",
    "TrainingState",
    "assemble",
    "box_shape",
    "box_slices",
    "check_tag",
    "complete_tags",
    "flat_boxes",
    "in_memory",
    "latest_tag",
    "newest_good",
    "open_state",
    "read_latest",
    "read_native",
    "save_native",
    "whole_box",
]
