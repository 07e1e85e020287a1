"""Keys of random draws: they come from torch's CPU generator, whatever draws with them."""

import torch

_LOW, _HIGH = -(2**31), 2**31 - 1


def draw_key() -> int:
    """The key of one draw, which `torch.manual_seed` repeats."""
    return int(torch.randint(_LOW, _HIGH, (), dtype=torch.int64))


def draw_keys(count: int) -> list[torch.Tensor]:
    """The keys of so many draws, 0-dim int32 each, as that many calls of `draw_key` make them."""
    return list(torch.randint(_LOW, _HIGH, (count,), dtype=torch.int64).to(torch.int32).unbind())
