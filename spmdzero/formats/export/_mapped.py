"""Tensors that are in a file instead of in memory, for what must have all of them at once."""

import mmap
import os
import tempfile

import torch

from spmdzero.formats._state import StoredTensor


def mapped(tensor: StoredTensor) -> torch.Tensor:
    """All of `tensor`, `[*shape]` on the CPU, in a file without a name in `tempfile.gettempdir()`.

    The system keeps of it in memory what there is room for, and the file goes with the tensor.

    Raises:
        OSError: that folder has no space, or none can be written there.
    """
    whole = tensor.whole()
    if not tensor.size:
        return whole
    try:
        with tempfile.TemporaryFile() as file:
            # A page that the disk has no room for would end the process when it is written to.
            os.posix_fallocate(file.fileno(), 0, tensor.size)
            memory = mmap.mmap(file.fileno(), tensor.size)
    except OSError as error:
        error.filename = error.filename or tempfile.gettempdir()
        raise
    held = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return held.copy_(whole)
