"""Equal blocks of a model as one loop of the program, which is compiled once."""

from spmdzero.backend.replica._anchors import kept
from spmdzero.backend.torch_xla.scan._calls import Scan, equal_blocks_as_loops
from spmdzero.backend.torch_xla.scan._stand_in import FollowError, made_real

__all__ = ["FollowError", "Scan", "equal_blocks_as_loops", "kept", "made_real"]
