"""Equal blocks of a model as one loop of the program, so that a block is compiled once."""

from spmdzero.backend.jax.scan._calls import Scan, equal_blocks_as_loops

__all__ = ["Scan", "equal_blocks_as_loops"]
