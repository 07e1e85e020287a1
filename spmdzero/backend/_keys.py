"""Keys of random draws: they come from torch's CPU generator on every backend."""

import torch

_LOW, _HIGH = -(2**31), 2**31 - 1


def draw_key() -> int:
    """The key of one draw; `torch.manual_seed` makes keys repeat."""
    return int(torch.randint(_LOW, _HIGH, (), dtype=torch.int64))


def key_of(value: int) -> torch.Tensor:
    """The key that `draw_key` drew as `value`, 0-dim int32."""
    return torch.tensor(value, dtype=torch.int64).to(torch.int32)


def draw_keys(count: int) -> list[torch.Tensor]:
    """The keys of `count` draws, 0-dim int32, the same as `count` calls of `draw_key` make."""
    if not count:
        return []
    return list(torch.randint(_LOW, _HIGH, (count,), dtype=torch.int64).to(torch.int32).unbind())
