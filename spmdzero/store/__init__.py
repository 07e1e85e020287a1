"""Training states as files: the native checkpoint format, and the form that all formats share."""

from spmdzero.store._boxes import Box, assemble, box_shape, flat_boxes, whole_box
from spmdzero.store._state import HostState, StoredTensor, TrainingState

__all__ = [
    "Box",
    "HostState",
    "StoredTensor",
    "TrainingState",
    "assemble",
    "box_shape",
    "flat_boxes",
    "whole_box",
]
