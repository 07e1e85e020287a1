"""Seeds the devices' own generator, which torch doesn't know, with `torch.manual_seed`."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch


def follow_torchs_seed(seed: Callable[[int], None]) -> None:
    """Seeds the devices' own generator with torch's seed, now and whenever a script seeds torch.

    Args:
        seed: seeds that generator with a number below 2**31.
    """
    _seeds["devices"] = seed
    _watched()
    seed(_number())


_seeds: dict[str, Callable[[int], None]] = {}


def _number() -> int:
    return torch.initial_seed() % 2**31


@functools.cache
def _watched() -> None:
    process = os.getpid()

    def following(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            # Workers of a data loader are forks, which seed themselves and have no devices.
            if os.getpid() == process:
                _seeds["devices"](_number())
            return made

        return seeded

    torch.manual_seed = torch.random.manual_seed = following(torch.manual_seed)
    torch.seed = torch.random.seed = following(torch.seed)
