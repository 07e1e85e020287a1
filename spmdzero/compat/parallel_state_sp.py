"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: how many devices share each row.

The module itself is the `mpu` that `initialize` takes: its size becomes the mesh's axis
``sequence``.
"""

from spmdzero.backend.hosts._row_sharers import (
    RowSharers,
    forget_row_sharers,
    row_sharers,
    share_rows,
)
from spmdzero.errors import SpmdZeroUsageError, UsageAssertionError

__all__ = [
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]

_release_sequence_parallel_groups = forget_row_sharers


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Has `initialize(mpu=...)` let this many devices share each row.

    Raises:
        SpmdZeroUsageError: the size is below 2; or another one was given before.
    """
    if sequence_parallel_size <= 1:
        raise SpmdZeroUsageError(
            f"initialize_sequence_parallel({sequence_parallel_size}): one device shares rows with "
            "no other. Leave it out"
        )
    share_rows(sequence_parallel_size)


def get_sequence_parallel_group() -> RowSharers:
    """The group of the devices that share rows; see `RowSharers` for what it computes.

    Raises:
        UsageAssertionError: `initialize_sequence_parallel` wasn't called.
    """
    group = row_sharers()
    if group is None:
        raise UsageAssertionError(
            "sequence parallel group is not initialized: call "
            "UlyssesSPAttentionHF.register_with_transformers(...) or "
            "initialize_sequence_parallel(size) first. `engine.sequence_parallel_size` is the "
            "size that a config has chosen"
        )
    return group


def get_sequence_parallel_world_size() -> int:
    """Number of devices that share each row.

    Raises:
        UsageAssertionError: as `get_sequence_parallel_group`.
    """
    return get_sequence_parallel_group().size()


def get_sequence_parallel_rank() -> int:
    """0: one process drives all devices that share a row.

    Raises:
        UsageAssertionError: as `get_sequence_parallel_group`.
    """
    return get_sequence_parallel_group().rank()
