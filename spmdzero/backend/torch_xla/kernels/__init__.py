"""Replacements for kernels of torch_xla 2.9 that differ from torch's, or have to be watched."""

from spmdzero.backend.torch_xla.kernels._calls import TorchsCalls
from spmdzero.backend.torch_xla.kernels._casts import refuse_casts_in_place
from spmdzero.backend.torch_xla.kernels._collectives import carry_collectives_over_hosts
from spmdzero.backend.torch_xla.kernels._diagonals import mend_diagonals
from spmdzero.backend.torch_xla.kernels._empty import mend_rolls_of_nothing
from spmdzero.backend.torch_xla.kernels._extremes import mend_extremes
from spmdzero.backend.torch_xla.kernels._labels import move_labels
from spmdzero.backend.torch_xla.kernels._lists import mend_writes_into_lists
from spmdzero.backend.torch_xla.kernels._norms import TorchsNorms
from spmdzero.backend.torch_xla.kernels._ranges import refuse_ranges_without_step
from spmdzero.backend.torch_xla.kernels._to_host import watch_copies_to_host
from spmdzero.backend.torch_xla.kernels._views import mend_views

__all__ = ["TorchsCalls", "TorchsNorms", "mend", "watch_copies_to_host"]


def mend() -> None:
    """Makes these kernels answer as torch's do, or refuse; once per process."""
    carry_collectives_over_hosts()
    mend_diagonals()
    mend_extremes()
    mend_rolls_of_nothing()
    move_labels()
    mend_writes_into_lists()
    refuse_casts_in_place()
    refuse_ranges_without_step()
    mend_views()
