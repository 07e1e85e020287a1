"""torch_xla 2.9's kernels where they answer otherwise than torch's, or have to be watched."""

from spmdzero.backend.torch_xla.kernels._experts import NoGroupedProducts
from spmdzero.backend.torch_xla.kernels._extremes import mend_extremes
from spmdzero.backend.torch_xla.kernels._labels import move_labels
from spmdzero.backend.torch_xla.kernels._norms import TorchsNorms
from spmdzero.backend.torch_xla.kernels._to_host import watch_copies_to_host

__all__ = [
    "NoGroupedProducts",
    "TorchsNorms",
    "mend_extremes",
    "move_labels",
    "watch_copies_to_host",
]
