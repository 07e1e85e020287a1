"""`spmdzero.checkpointing` recomputes in the compiled program, and changes no number."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import spmdzero
from spmdzero import checkpointing
from spmdzero.inspect import peak_temporary_bytes

ROWS, WIDTH, WIDE, BLOCKS = 512, 16, 512, 4


class Block(nn.Module):
    def __init__(self, around: Callable[..., Any] | None, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.around, self.dropout = around, dropout

    def inner(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), self.dropout, self.training)) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.inner(x) if self.around is None else self.around(self.inner, x))


class Tower(nn.Module):
    def __init__(self, around: Callable[..., Any] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(around, dropout) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(around: Callable[..., Any] | None, dropout: float = 0.0) -> tuple[list[float], str]:
    """Losses of three steps, and the compiled step."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = spmdzero.initialize(model=Tower(around, dropout), config=config)
    texts: list[str] = []
    losses = []
    for step in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        with engine.observe(lambda graph: texts.append(graph.hlo())):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses, texts[-1]


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], str]:
    return train(None)


@pytest.fixture(scope="module")
def checkpointed() -> tuple[list[float], str]:
    return train(checkpointing.checkpoint)


def products(hlo: str) -> int:
    return len(re.findall(r" dot\(", hlo))


# One device's activations of one block: three of [rows, WIDE] fp32 (up, gelu, its derivative).
ACTIVATION = (ROWS // 8) * WIDE * 4


def test_the_compiled_step_computes_the_blocks_twice_and_holds_less(plain, checkpointed) -> None:
    assert products(checkpointed[1]) >= products(plain[1]) + BLOCKS
    saved = peak_temporary_bytes(plain[1]) - peak_temporary_bytes(checkpointed[1])
    assert saved >= (BLOCKS - 1) * ACTIVATION


def test_losses_are_those_without_checkpointing(plain, checkpointed) -> None:
    # The same operations; XLA fuses them in another way.
    assert checkpointed[0] == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.backends("jax", "torch_xla")
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchs_own_checkpoint_computes_twice_and_holds_less(plain, reentrant: bool) -> None:
    # The first block's input needs a gradient, without which a reentrant checkpoint has none.
    losses, hlo = train(
        lambda f, x: torch_checkpoint(f, x + f.__self__.down.bias * 0, use_reentrant=reentrant)
    )
    assert losses == pytest.approx(plain[0], rel=1e-5)
    assert products(hlo) >= products(plain[1]) + BLOCKS
    assert peak_temporary_bytes(plain[1]) - peak_temporary_bytes(hlo) >= (BLOCKS - 1) * ACTIVATION


@pytest.mark.slow
def test_dropout_drops_the_same_elements_in_both_runs() -> None:
    assert train(checkpointing.checkpoint, 0.5)[0] == pytest.approx(train(None, 0.5)[0], rel=1e-5)


def test_it_works_on_the_cpu_and_with_keyword_arguments() -> None:
    torch.manual_seed(0)
    block, x = Block(None, 0.0), torch.randn(4, WIDTH, requires_grad=True)
    block.inner(x, scale=2.0).sum().backward()
    expected, x.grad = x.grad, None
    checkpointing.checkpoint(block.inner, x, scale=2.0).sum().backward()
    assert torch.equal(x.grad, expected)
    x.grad = None
    checkpointing.non_reentrant_checkpoint(lambda t: block.inner(t, scale=2.0), x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_forked_random_state_goes_on_where_it_was_and_leaves_the_outer_one() -> None:
    checkpointing.model_parallel_cuda_manual_seed(7)
    outside = torch.get_rng_state()
    tracker = checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), outside)
    generator = torch.Generator().manual_seed(7 + 2718)
    assert torch.equal(first, torch.rand(3, generator=generator))
    assert torch.equal(second, torch.rand(3, generator=generator))
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="no random state 'other'"):
        tracker.fork("other").__enter__()
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="added before"):
        tracker.add("model-parallel-rng", 1)


def test_model_parallelism_is_refused() -> None:
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="no model parallelism"):
        checkpointing.configure(object())


STAYS = "what checkpointed blocks keep stays where it is, not in host memory"


@pytest.mark.parametrize(
    "configure",
    [
        {"checkpoint_in_cpu": True},
        {"deepspeed_config": {"activation_checkpointing": {"cpu_checkpointing": True}}},
    ],
    ids=["argument", "config"],
)
def test_inputs_kept_in_cpu_change_no_number_and_one_line_says_where_they_are_on_cpu_devices(
    checkpointed, configure: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if config := configure.get("deepspeed_config"):
        configure = {"deepspeed_config": {"train_batch_size": 8, **config}}
    checkpointing.configure(None, **configure)
    with caplog.at_level("INFO", logger="spmdzero"):
        losses, hlo = train(checkpointing.checkpoint)
    checkpointing.configure(None)
    assert losses == checkpointed[0]
    assert products(hlo) == products(checkpointed[1])
    assert caplog.text.count(STAYS) == 1


def test_an_argument_of_configure_is_heard_before_the_config(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"train_batch_size": 8, "activation_checkpointing": {"cpu_checkpointing": True}}
    checkpointing.configure(None, config, checkpoint_in_cpu=False)
    with caplog.at_level("INFO", logger="spmdzero"):
        checkpointing.checkpoint(torch.sin, torch.ones(2))
    assert STAYS not in caplog.text


def test_configure_takes_deepspeeds_options_and_config() -> None:
    checkpointing.configure(None, {"train_batch_size": 8}, num_checkpoints=4, profile=False)
    assert checkpointing.is_configured()
    checkpointing.reset()
    checkpointing.set_num_layers(4)
    checkpointing.partition_activations_in_checkpoint(True)


def test_partition_activations_is_without_meaning_as_in_the_config(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="spmdzero"):
        checkpointing.configure(None, partition_activations=True)
    assert "without meaning for checkpointing under XLA: partition_activations" in caplog.text


def test_it_takes_no_part_in_the_backward_of_an_engine_whose_loss_does_not_come_from_it() -> None:
    class Bessel(nn.Linear):
        """Has an operation that runs on the CPU, which no replica region can."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(super().forward(x)).mean()

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    x = torch.randn(8, WIDTH)
    recomputing, *_ = spmdzero.initialize(model=Tower(checkpointing.checkpoint), config=config)
    other, *_ = spmdzero.initialize(
        model=Bessel(WIDTH, WIDTH), config=config | {"spmd": {"forward": "global"}}
    )
    for engine in (recomputing, other):
        engine.backward(engine(x))
        engine.step()
    assert recomputing.global_steps == other.global_steps == 1
    # Nor before, or if it never comes: what was dropped may still be in memory.
    waits = recomputing(x)
    other.backward(other(x))
    other.step()
    recomputing.backward(waits)
    recomputing.step()
    assert recomputing.global_steps == other.global_steps == 2
