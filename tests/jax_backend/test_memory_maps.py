"""Memory maps, of which programs compiled for CPUs take up to what Linux lets a process have."""

import pytest
import torch

from spmdzero.backend import _memory_maps as memory_maps
from spmdzero.backend import counters, runtime

pytestmark = [
    pytest.mark.backends("jax"),
    pytest.mark.skipif(memory_maps.limit() is None, reason="it is Linux that limits them"),
]


def compiled(size: int) -> torch.Tensor:
    """What a program of its own makes on the devices."""
    x = torch.ones(size, 8, device=runtime.device())
    for _ in range(4):
        x = torch.softmax(x @ torch.ones(8, 8, device=x.device), -1)
    return x.sum().cpu()


def test_the_older_half_is_let_go_of_before_there_are_no_more(
    mesh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(3)
    before = memory_maps.count()
    for size in range(10, 30):
        compiled(size)
    taken = memory_maps.count()
    assert taken > before + 20
    compiles = counters.compiled()[0]
    assert compiled(29) == 29
    assert counters.compiled()[0] == compiles
    # Each further program is one too many; a half of 512 at a time, few are left.
    monkeypatch.setattr(memory_maps, "limit", lambda: 4)
    for size in range(31, 41):
        compiled(size)
    assert memory_maps.count() < taken - 20
    monkeypatch.undo()
    # What was let go of is compiled again.
    compiles = counters.compiled()[0]
    assert compiled(3) == 3
    assert counters.compiled()[0] > compiles
