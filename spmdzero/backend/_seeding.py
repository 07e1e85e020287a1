"""Seeds the devices' own generator, which torch doesn't know, with `torch.manual_seed`."""

import functools
import os
from collections.abc import Callable

import torch

from spmdzero._replaced import in_place_of


def follow_torchs_seed(seed: Callable[[int], None]) -> None:
    """Seeds the devices' own generator with torch's seed, now and whenever a script seeds torch.

    Args:
        seed: seeds that generator with a number below 2**31.
    """
    _seeds["devices"] = seed
    _watched()
    seed(_below(torch.initial_seed()))


_seeds: dict[str, Callable[[int], None]] = {}


@functools.cache
def _watched() -> None:
    process = os.getpid()

    @in_place_of(
        torch.cuda, "manual_seed_all",
        because="torch.manual_seed and torch.seed call it, also those imported by name before",
    )  # fmt: skip
    def seeded(own: Callable[[int], None], seed: int) -> None:
        own(seed)
        # Workers of a data loader are forks, which seed themselves and have no devices.
        if os.getpid() == process:
            _seeds["devices"](_below(seed))


def _below(seed: int) -> int:
    return int(seed) % 2**31
