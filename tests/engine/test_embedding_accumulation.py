"""Gradients of an embedding, accumulated over micro-batches, are torch's.

On TPU they come out wrong where a loop accumulates them and XLA moves the sum over devices out of
it (https://github.com/openxla/xla/issues/49143). Here each micro-batch is a program of its own,
which tests/explain/test_golden.py reads off the TPU's programs; this is what they compute.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.engines import start, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS, LENGTH, VOCABULARY, DIM, MICRO_BATCHES = 8, 6, 64, 32, 4


class Tied(nn.Module):
    """The embedding is read at the start and again as the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.embedding(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), x.roll(1, 1).reshape(-1))


class Padded(nn.Module):
    """A row that takes no gradient, and tokens that repeat within each sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, DIM, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x).pow(3).mean()


def micro_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Of 8 of the tokens, so that each micro-batch and each device repeats some.
    return [torch.randint(8, (ROWS, LENGTH), generator=generator) for _ in range(MICRO_BATCHES)]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("model", [Tied, Padded])
def test_what_accumulates_is_torchs_gradient(model: type[nn.Module], stage: int) -> None:
    module, peer = model(), model()
    before = peer.embedding.weight.detach().clone()
    engine = start(
        module,
        gradient_accumulation_steps=MICRO_BATCHES,
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
        zero_optimization={"stage": stage},
        zero_allow_untested_optimizer=True,
        gradient_clipping=0.0,
        # The table has 2,048 elements, and is sharded.
        spmd={"min_shard_elements": 1},
    )
    for x in micro_batches():
        (peer(x) / MICRO_BATCHES).backward()
        three_calls(engine, x)
    moved = before - engine.module.embedding.weight.detach().cpu()
    expected = peer.embedding.weight.grad
    # Sums of at most 8 x 6 x 4 fp32 terms in another order, and one subtraction from weights of
    # about 1.
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=3e-7)
    assert torch.count_nonzero(moved.abs().sum(1)) < VOCABULARY if model is Padded else True
