"""Equal blocks of a model as one loop of the program, so that a block is compiled once.

A backend provides the way in which its programs loop.
"""

from spmdzero.backend.scan._calls import Scan, equal_blocks_as_loops
from spmdzero.backend.scan._parts import Form, Loops
from spmdzero.backend.scan._pending_block import StandIn, made_real

__all__ = ["Form", "Loops", "Scan", "StandIn", "equal_blocks_as_loops", "made_real"]
