"""Buffers that a traced program reads, and that may hold something else when it runs again."""

from collections.abc import Collection, Sequence

import torch

from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla.capture import ProgramInput
from spmdzero.backend.torch_xla.uploads import Uploads


def strangers(
    inputs: Sequence[ProgramInput], uploads: Uploads, *, known: Collection[int] = ()
) -> list[ProgramInput]:
    """Those of a program's inputs of which nobody here knows what they will be the next time.

    Not among them are Python numbers, and the indices that torch_xla uploads for its own use, such
    as those of a slice of an expanded tensor.

    Args:
        inputs: of the program; a seed is a stranger.
        uploads: since the trace began; those that are constants are no strangers.
        known: handles of others that are not.
    """
    known = {*known, *uploads.constants}
    return [
        found
        for found in inputs
        if found.is_seed
        or not (found.handle in known or found.is_number() or _may_be_indices(found, uploads.since))
    ]


def is_fixed(tensor: torch.Tensor, uploads: Uploads) -> bool:
    """Whether a pending value depends on no stranger, and no seed or key of random numbers."""
    ids, values = _private.program_inputs([tensor])
    if _private.any_without_data(values):
        return False
    return not strangers(ProgramInput.over(ids, values), uploads)


def _may_be_indices(found: ProgramInput, since: int) -> bool:
    # Whatever was there before has a lower id, also when it is read through a new view of it.
    tensor = found.tensor
    return tensor.dim() > 0 and tensor.dtype == torch.int64 and found.first_id > since
