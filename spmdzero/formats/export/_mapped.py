"""Tensors in a file instead of in memory, for code that needs all of them at once."""

import mmap
import os
import tempfile

import torch

from spmdzero.formats._state import StoredTensor


def mapped(tensor: StoredTensor) -> torch.Tensor:
    """The whole `tensor`, `[*shape]` on the CPU, in a nameless file in `tempfile.gettempdir()`.

    The system keeps as much of it in memory as there is room for; the file lives as long as the
    tensor.

    Raises:
        OSError: that folder has no space, or can't be written.
    """
    whole = tensor.whole()
    if not tensor.size:
        return whole
    try:
        with tempfile.TemporaryFile() as file:
            # Reserve the space: writing a page without space on the disk would end the process.
            os.posix_fallocate(file.fileno(), 0, tensor.size)
            memory = mmap.mmap(file.fileno(), tensor.size)
    except OSError as error:
        error.filename = error.filename or tempfile.gettempdir()
        raise
    held = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return held.copy_(whole)
