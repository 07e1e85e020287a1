"""Equal blocks of a model as one loop of the program, which is compiled once.

A backend says how its programs loop.
"""

from spmdzero.backend.scan._calls import Scan, equal_blocks_as_loops
from spmdzero.backend.scan._parts import Form, Loops
from spmdzero.backend.scan._pending_block import StandIn, made_real

__all__ = ["Form", "Loops", "Scan", "StandIn", "equal_blocks_as_loops", "made_real"]
