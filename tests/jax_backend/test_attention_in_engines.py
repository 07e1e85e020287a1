"""An engine whose attention is by kernels, interpreted on the CPU: the same numbers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.backend import Mesh
from spmdzero.errors import SpmdZeroConfigError
from tests.engine.test_trajectories import FP32
from tests.support import contract
from tests.support.trajectory import recording


class Attention(contract.Attention):
    """The recorded model's, by torch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            t.unflatten(2, (contract.HEADS, -1)).transpose(1, 2)
            for t in self.c_attn(x).chunk(3, dim=2)
        )
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Recomputed(nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def engine_of(config: dict[str, Any], attention: str, *, recomputes: bool = False) -> Any:
    model = contract.make_model()
    for block in model.h:
        block.attn.__class__ = Attention
    if recomputes:
        model.h = nn.ModuleList(Recomputed(block) for block in model.h)
    config = config | {"train_micro_batch_size_per_gpu": 1, "spmd": {"attention": attention}}
    engine, *_ = spmdzero.initialize(model=model, config=config)
    return engine


def losses(engine: Any, *, steps: int) -> list[float]:
    batches = (contract.make_batch(step, 0) for step in range(steps))
    return [engine.train_batch(iter([batch])).item() for batch in batches]


def test_losses_are_those_that_deepspeed_recorded_in_traced_and_in_replayed_steps(
    mesh: Mesh,
) -> None:
    recorded = recording("z2_w2_fp32_gas1")
    engine = engine_of(recorded["ds_config"], "kernel")
    found = losses(engine, steps=6)
    assert engine.capture.replayed == 3
    assert [call.plain_because for call in engine.attention] == [None, None]
    assert "'h.1.attn'" in engine.attention[1].where
    for ours, theirs in zip(found, recorded["records"], strict=False):
        assert ours == pytest.approx(theirs["loss"], abs=FP32.loss)


@pytest.mark.slow
def test_what_is_recomputed_is_recomputed_by_kernels(mesh: Mesh) -> None:
    # With other operations there torch refuses what was recomputed.
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    plain = losses(engine_of(config, "plain"), steps=4)
    engine = engine_of(config, "kernel", recomputes=True)
    assert losses(engine, steps=4) == pytest.approx(plain, abs=FP32.loss)
    assert [call.plain_because for call in engine.attention] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [{"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}], ids=str
)
def test_16_bit_losses_are_the_plain_ones_up_to_rounding(
    mesh: Mesh, precision: dict[str, Any]
) -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}} | precision
    plain = losses(engine_of(config, "plain"), steps=5)
    engine = engine_of(config, "kernel")
    # A loss near 5 has steps of 2 ** -6 in bf16; its mean over rows was rounded to one of them.
    assert losses(engine, steps=5) == pytest.approx(plain, abs=2**-5)
    assert [call.plain_because for call in engine.attention] == [None, None]


def test_on_the_cpu_attention_is_plain_unless_asked_for(mesh: Mesh) -> None:
    engine = engine_of({"optimizer": {"type": "AdamW"}}, "auto")
    losses(engine, steps=1)
    assert engine.attention == ()


def test_a_global_forward_has_no_kernels() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r"spmd.attention.*a global forward lacks"):
        spmdzero.initialize(
            model=contract.make_model(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "spmd": {"attention": "kernel", "forward": "global"},
            },
        )
