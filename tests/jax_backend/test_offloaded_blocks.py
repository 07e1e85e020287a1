"""Recomputed blocks for TPUs: what they keep is on the host, and a loop's products lie by rows."""

import importlib.util
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.explain import CompilerMemory
from tests.engine.test_recompute import BLOCKS, STAYS, WIDTH, Stack
from tests.jax_backend.for_tpus import step_for_tpus
from tests.support.engines import config, start

HOST, DEVICE = (f'_xla_buffer_placement = "{kind}"' for kind in ("pinned_host", "device"))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_they_give_the_same_bits_whatever_is_read_and_one_line_says_that_cpu_devices_keep_it(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="spmdzero")
    weights = []
    for policy, reads in (("everything", False), ("offload", False), ("offload", True)):
        torch.manual_seed(0)
        engine = start(Stack(), spmd={"recompute": policy}, zero_optimization={"stage": stage})
        torch.manual_seed(5)
        loss = engine(torch.ones(8, WIDTH))
        if reads:
            assert loss.item() > 0
        engine.backward(loss)
        engine.step()
        weights.append(torch.cat([p.detach().cpu().flatten() for p in engine.module.parameters()]))
    assert torch.equal(weights[0], weights[1])
    # What is read ends a program, and XLA fuses the two parts of it otherwise.
    assert torch.allclose(weights[0], weights[2], rtol=0, atol=1e-6)
    assert caplog.text.count(STAYS) == 1


def lowered_for_tpus(
    recompute: str, *, blocks: int = BLOCKS, scan: str = "off", **more: object
) -> str:
    """The program of a step over equal blocks, as text."""
    engine = start(Stack(blocks), spmd={"recompute": recompute, "scan": scan}, **more)
    return step_for_tpus(engine, torch.ones(8, WIDTH))


def test_a_program_for_tpus_moves_each_blocks_input_there_and_back() -> None:
    assert HOST not in lowered_for_tpus("everything")
    for text in (
        lowered_for_tpus("offload"),
        lowered_for_tpus("everything", activation_checkpointing={"cpu_checkpointing": True}),
    ):
        # JAX says of the program's outputs too that they are on the devices.
        moves = [line for line in text.splitlines() if f"tensor<1x{WIDTH}xf32>" in line]
        assert sum(HOST in line for line in moves) == BLOCKS
        assert sum(DEVICE in line for line in moves) == BLOCKS


def test_a_loops_products_are_to_stay_row_by_row() -> None:
    assert "LayoutConstraint" not in lowered_for_tpus("everything", blocks=4)
    text = lowered_for_tpus("everything", blocks=4, scan="on")
    assert "stablehlo.while" in text
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    # All products of this model are of the blocks.
    assert len(products) == text.count("@LayoutConstraint") > 0


class Gated(nn.Module):
    """Blocks with two products that are wider than their inputs."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_loops_wide_products_are_written_before_they_are_widened() -> None:
    told = {"bf16": {"enabled": True}, "spmd": {"recompute": "everything", "scan": "on"}}
    engine = start(Gated(4), **told)
    text = step_for_tpus(engine, torch.ones(8, WIDTH, dtype=torch.bfloat16))
    held = re.findall(r"optimization_barrier .*: tensor<1x(\d+)xbf16>", text)
    # The gates and their factors, in forward and again in backward, and the gradient of `down`'s.
    assert held == [str(3 * WIDTH)] * 5


WIDE, LENGTH, ROWS_A_CHIP, DEEP = 512, 512, 8, 4
KEPT = ROWS_A_CHIP * LENGTH * WIDE * 2  # bytes of one block's input in bf16


class Wide(nn.Module):
    """A gated block of which the TPU keeps little in its vector memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gates = nn.LayerNorm(WIDE), nn.Linear(WIDE, 3 * WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.gates(self.norm(x)).chunk(3, -1)
        return x + self.down(F.gelu(self.up(F.silu(a) * b * c)))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Wide() for _ in range(DEEP)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).float().square().mean()


def on_v5e(recompute: str) -> tuple[CompilerMemory, int]:
    """What libtpu says of a step's memory, and the cycles of its operations."""
    told = config(
        train_micro_batch_size_per_gpu=ROWS_A_CHIP,
        bf16={"enabled": True},
        spmd={"recompute": recompute},
    )
    with torch.device("meta"):
        batch = torch.empty(8 * ROWS_A_CHIP, LENGTH, WIDE, dtype=torch.bfloat16)
        model = Chain()
    made = spmdzero.explain(model, told, batch, tpu=["v5e:2x4"], stages=())
    (found,) = made.fit_at(2).compiled
    return found.memory, made.time_on("v5e:2x4").cycles


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
def test_the_tpus_compiler_keeps_the_blocks_inputs_on_the_host() -> None:
    (plain, cycles), (offloaded, more_cycles) = on_v5e("everything"), on_v5e("offload")
    assert (plain.host_peak, offloaded.host_arguments) == (0, 0)
    # It may leave the first and the last block's input on the device.
    assert (DEEP - 2) * KEPT <= offloaded.host_peak <= DEEP * KEPT
    assert offloaded.arguments == plain.arguments
    # Copies back that libtpu starts early stand beside what is computed: the peak needn't fall.
    assert offloaded.peak <= plain.peak + KEPT
    assert more_cycles < 1.02 * cycles
