"""`deepspeed.runtime.utils`: the functions of it that training scripts call."""

import gc
import os
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from spmdzero.backend import map_tensors
from spmdzero.compat import comm
from spmdzero.compat.accelerator import get_accelerator


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints the accelerator's current and peak memory on the first process, if `force`.

    Raises:
        SpmdZeroUsageError: the accelerator doesn't report its memory.
    """
    if not force or comm.get_rank() != 0:
        return
    gc.collect()
    accelerator = get_accelerator()
    used, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    total, free = accelerator.total_memory(), accelerator.available_memory()
    print(message)
    print(f"MA {used / 2**30:.2f} GB         Max_MA {peak / 2**30:.2f} GB")
    print(
        f"CPU Virtual Memory:  used = {(total - free) / 2**30:.2f} GB, "
        f"percent = {100 * (total - free) / total:.1f}%"
    )
    accelerator.reset_peak_memory_stats()


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Copies a tensor, or those in nested lists, tuples and dicts, to `device`.

    Args:
        item: tensors; anything else is left as it is.
        device: where to.
        criterion_func: which tensors move; None moves all.
    """

    def move(_: str, tensor: Any) -> Any:
        wanted = criterion_func is None or criterion_func(tensor)
        return tensor.to(device) if wanted else tensor

    return map_tensors(item, move)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2,
    mpu: Any = None,
) -> torch.Tensor:
    """Scales gradients in place to a norm of at most `max_norm`; returns the norm before that.

    It works on the parameters of an engine between `backward` and `step`.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: list[float]) -> float:
    """The L2 norm of several L2 norms."""
    return sum(norm**2.0 for norm in norm_list) ** 0.5


def set_random_seed(seed: int) -> None:
    """Seeds random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of the file `filename`."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def empty_cache() -> None:
    """Calls `get_accelerator().empty_cache()`."""
    get_accelerator().empty_cache()
