"""What `load_state_dict` writes into a module that an engine trains."""

import pytest
import torch
from torch import nn

import spmdzero

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).pow(2).mean()


@pytest.fixture
def engine() -> spmdzero.Engine:
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(model=Pair(), config=CONFIG)
    # A trained master has digits that its bf16 parameter has not.
    engine.backward(engine(torch.randn(8, 64).bfloat16()))
    engine.step()
    return engine


def masters(engine: spmdzero.Engine) -> dict[str, torch.Tensor]:
    assert engine.optimizer is not None
    return {
        name: engine.optimizer.state[parameter]["master"].cpu()
        for name, parameter in engine.module.named_parameters()
    }


def test_a_partial_state_dict_leaves_the_digits_of_other_masters_alone(engine) -> None:
    before = masters(engine)
    engine.module.load_state_dict({"up.weight": torch.full((64, 64), 0.5)}, strict=False)
    after = masters(engine)
    assert torch.equal(after.pop("up.weight"), torch.full((64, 64), 0.5))
    for name, master in after.items():
        assert torch.equal(master, before[name]), name
        assert not torch.equal(master, master.bfloat16().float()), name


def test_loading_a_submodule_reaches_its_masters(engine) -> None:
    loaded = {"weight": torch.full((64, 64), 0.25), "bias": torch.full((64,), 2.0)}
    engine.module.down.load_state_dict(loaded)
    after = masters(engine)
    for name, value in loaded.items():
        assert torch.equal(after[f"down.{name}"], value)


def test_assigning_instead_of_copying_is_refused_before_anything_changes(engine) -> None:
    before = [*engine.module.parameters()]
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="Leave assign out"):
        engine.module.load_state_dict(Pair().state_dict(), assign=True)
    assert all(now is then for now, then in zip(engine.module.parameters(), before, strict=True))


def test_a_plain_state_dict_is_no_checkpoint(engine) -> None:
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"engine\.module\.load_state_dict"):
        engine.load_module_state_dict(Pair().state_dict())
