"""Training states written for other programs: Hugging Face, torch, and plain state dicts."""

from spmdzero.formats.export._weight_files import write_safetensors, write_state_dict
from spmdzero.formats.export._weights import Weights, dtype_called, frozen_names

__all__ = [
    "Weights",
    "dtype_called",
    "frozen_names",
    "write_safetensors",
    "write_state_dict",
]
