"""`torch.manual_seed` after `initialize` reaches draws on the devices outside of the engine."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from spmdzero.compat.accelerator import get_accelerator
from tests.support.engines import Mean, start

SEEDS: dict[str, Callable[[int], object]] = {
    "torch.manual_seed": lambda seed: torch.manual_seed(seed),
    "torch.random.manual_seed": lambda seed: torch.random.manual_seed(seed),
    "get_accelerator().manual_seed": lambda seed: get_accelerator().manual_seed(seed),
    "get_accelerator().manual_seed_all": lambda seed: get_accelerator().manual_seed_all(seed),
}


def drawn(device: torch.device) -> torch.Tensor:
    ones = torch.ones(8, device=device)
    made = [torch.randn(8, device=device), torch.rand_like(ones), F.dropout(ones)]
    return torch.stack(made).cpu()


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_after_initialize_repeats_draws_on_the_devices(name: str) -> None:
    seed = SEEDS[name]
    engine = start(Mean())
    seed(7)
    first, more = drawn(engine.device), drawn(engine.device)
    seed(7)
    assert torch.equal(drawn(engine.device), first)
    assert not torch.equal(more, first)


def test_a_seed_that_nobody_chose_is_another_each_time() -> None:
    engine = start(Mean())
    torch.seed()
    first = drawn(engine.device)
    torch.seed()
    assert not torch.equal(drawn(engine.device), first)
