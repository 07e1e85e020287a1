"""`untyped_storage()` and `data_ptr()` of a tensor on the devices, which has no memory here.

Code that writes files asks with them which tensors share memory, and how much (safetensors, and so
transformers, peft, accelerate and huggingface_hub). Here those share memory that share a cell.
"""

import math

import torch

from spmdzero.backend.jax.lazy._cells import Cell
from spmdzero.backend.jax.lazy._python import answer, no_memory
from spmdzero.backend.jax.lazy._tensor import DEVICE, LazyTensor

# No process has memory up there, so that code which reads at such an address ends at once.
_NOWHERE = 1 << 62


class CellStorage:
    """Tells a tensor's storage from others; its bytes can't be read.

    Attributes:
        device: the device of the tensor.
    """

    device = DEVICE

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def data_ptr(self) -> int:
        """A number that no other storage has as long as this one lives; no address of memory."""
        return _NOWHERE + id(self._cell)

    def nbytes(self) -> int:
        """The number of bytes of all its elements, those of all devices together."""
        value = self._cell.value
        return math.prod(value.shape) * value.dtype.itemsize

    def size(self) -> int:
        """The same as `nbytes`, as torch has both."""
        return self.nbytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellStorage) and self._cell is other._cell

    def __hash__(self) -> int:
        return hash(self.data_ptr())

    def __getattr__(self, name: str) -> None:
        raise AttributeError(no_memory(f"storage, and its {name},"))


@answer(torch.Tensor.untyped_storage)
def _storage(tensor: LazyTensor) -> CellStorage:
    return CellStorage(tensor.cell)


@answer(torch.Tensor.data_ptr)
def _address(tensor: LazyTensor) -> int:
    return _storage(tensor).data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
