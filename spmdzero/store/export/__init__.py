"""Training states written for other programs: Hugging Face, torch, and plain state dicts."""

from spmdzero.store.export._dcp import write_dcp
from spmdzero.store.export._safetensors import write_safetensors
from spmdzero.store.export._state_dict import save_whole, write_state_dict
from spmdzero.store.export._weights import Weights, dtype_called, frozen_names

__all__ = [
    "Weights",
    "dtype_called",
    "frozen_names",
    "save_whole",
    "write_dcp",
    "write_safetensors",
    "write_state_dict",
]
