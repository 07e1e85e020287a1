"""The mesh axis sequence: devices that share the rows of a replica, each with a part of them."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import arrays
from spmdzero.errors import ReplicaRegionError, SpmdZeroConfigError
from tests.jax_backend.test_tensor_axis import (
    CLOSE,
    LENGTH,
    ROWS,
    WIDTH,
    WORDS,
    assert_gradients_are_those_of_one_axis,
    assert_same,
    batch,
    config_of,
    llama,
    started,
    trained,
)
from tests.support.processes import run_python

MESH = {"fsdp": 4, "sequence": 2}
HEADS, KV_HEADS, HEAD = 8, 4, WIDTH // 8


def padded(step: int) -> dict[str, torch.Tensor]:
    """Rows with as many labels each, before or behind their padding."""
    ids = batch(step)["input_ids"]
    seen = torch.ones_like(ids)
    seen[::2, -5:] = 0
    seen[1::2, :5] = 0
    labels = ids.masked_fill(seen == 0, -100)
    # What precedes it is padding; the first label of other rows is no token's next one.
    labels[1::2, 5] = -100
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses and norm on one axis."""
    return trained(started({"fsdp": 8}))


@pytest.fixture(scope="module")
def shared() -> Any:
    """An engine on 4 replicas of two devices that has trained 4 steps, and what it trained."""
    engine = started(MESH)
    return engine, trained(engine)


def test_losses_and_norm_are_those_of_one_axis(alone: list[float], shared: Any) -> None:
    assert_same(shared[1], alone)


def test_sums_of_16_bits_end_on_cpus() -> None:
    """XLA's pass that widens such sums ends the process on those within a replica."""
    alone, shared = (
        trained(started(mesh, bf16={"enabled": True}), steps=2) for mesh in ({"fsdp": 8}, MESH)
    )
    # bf16 has 8 bits, and is rounded in other sums.
    torch.testing.assert_close(shared, alone, rtol=2**-8, atol=0.0)


def test_attention_gets_whole_rows_by_all_to_alls_and_nothing_is_gathered(shared: Any) -> None:
    engine, _ = shared
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([batch(9)]))
    ledger = ledgers.boundary
    assert ledger.activations == ()
    within = ledger.of_role("sequence")
    rows, part = ROWS // 4, LENGTH // 2
    moved = Counter(math.prod(c.shape) for c in within if c.kind == "all-to-all")
    # In each block query, key and value together, and the result; forward and backward.
    head = rows * part * HEAD
    assert moved == {head * (HEADS + 2 * KV_HEADS): 2 * 2, head * HEADS: 2 * 2}
    # Each device has a summand of the gradient of every weight.
    sums = [c.shape for c in within if c.kind == "all-reduce" and not c.is_scalar]
    assert Counter(sums) == Counter(tuple(p.shape) for p in engine.module.parameters())
    assert {c.kind for c in within} == {"all-to-all", "all-reduce"}


def test_each_device_of_a_replica_holds_its_part_of_the_states(shared: Any) -> None:
    engine, _ = shared
    weight = engine.module.model.layers[0].self_attn.q_proj.weight
    assert set(arrays.local_shapes(weight)) == {(WIDTH, WIDTH)}
    moment = engine.optimizer.state[weight]["exp_avg"]
    assert set(arrays.local_shapes(moment)) == {(WIDTH // 8, WIDTH)}
    # One number crosses each axis for the norm of all gradients: no tensor has a sum of its own.
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([batch(8)]))
    assert sorted(c.group_size for c in ledgers.boundary.of_role("norm")) == [2, 4]


def test_the_fused_loss_is_computed_of_each_devices_own_positions(alone: list[float]) -> None:
    engine = started(MESH, spmd={"fused_loss": True})
    assert_same(trained(engine), alone)
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([batch(9)]))
    ledger = ledgers.boundary
    assert ledger.activations == ()
    within = ledger.of_role("sequence")
    assert {c.kind for c in within} == {"all-to-all", "all-reduce"}
    sums = [c.shape for c in within if c.kind == "all-reduce" and not c.is_scalar]
    assert Counter(sums) == Counter(tuple(p.shape) for p in engine.module.parameters())


@pytest.mark.slow
def test_masks_and_shifted_labels_are_those_of_whole_rows() -> None:
    found = []
    for mesh in ({"fsdp": 8}, {"fsdp": 2, "sequence": 4}):
        engine = started(mesh, stage=3)
        found.append([engine.train_batch(iter([padded(step)])).item() for step in range(3)])
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_a_checkpoint_goes_from_mesh_to_mesh(shared: Any, tmp_path: Path) -> None:
    engine, _ = shared
    engine.save_checkpoint(tmp_path, tag="kept")
    after = [engine.train_batch(iter([batch(20 + step)])).item() for step in range(2)]
    other = started({"fsdp": 2, "sequence": 4}, stage=3)
    other.load_checkpoint(tmp_path, tag="kept")
    again = [other.train_batch(iter([batch(20 + step)])).item() for step in range(2)]
    torch.testing.assert_close(again, after, **CLOSE)


class Drops(nn.Module):
    """What dropout leaves of rows that each device has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * self.scale, 0.5)


def test_parts_of_a_row_draw_numbers_of_their_own() -> None:
    engine, *_ = spmdzero.initialize(model=Drops(), config=config_of(MESH))
    with torch.no_grad():
        kept = engine(torch.ones(ROWS, LENGTH, WIDTH)).cpu() > 0
    first, second = kept.flatten(2).chunk(2, dim=1)
    assert 0.45 < kept.float().mean().item() < 0.55
    assert 0.45 < (first == second).float().mean().item() < 0.55


def test_deepspeeds_key_asks_for_the_axis() -> None:
    config = config_of({"fsdp": 2}, sequence_parallel_size=4)
    config["spmd"]["mesh"] = {"fsdp": -1}
    engine, *_ = spmdzero.initialize(model=llama(), config=config)
    assert dict(engine.mesh.spec.axes) == {"fsdp": 2, "sequence": 4}
    assert (engine.sequence_parallel_size, engine.dp_world_size) == (4, 2)
    assert engine.train_batch_size() == ROWS


BF16 = """
import torch
import spmdzero
from tests.jax_backend.test_sequence_axis import Projects

torch.manual_seed(0)
engine, *_ = spmdzero.initialize(model=Projects(), config={
    "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "zero_optimization": {"stage": 2},
})
loss = engine(torch.randn(2, 8, 16, dtype=torch.bfloat16))
engine.backward(loss)
engine.step()
print(engine.communication_data_type, engine.module.weight.float().std().item() > 0)
"""


def test_bf16_gradients_of_shared_rows_are_reduced_in_fp32() -> None:
    # XLA's CPU compiler ends a process whose region sums bf16 beside an axis that it divides.
    said = run_python("-c", BF16, devices=4, SPMDZERO_BACKEND="jax", USE_TORCH_XLA="false")
    assert said.splitlines()[-1] == "torch.float32 True"


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield config_of({"fsdp": 1, "sequence": 8}, spmd={"forward": "global"}), "spmd.forward"
    yield config_of(MESH, sequence_parallel_size=4), "the same axis"
    yield (
        config_of({"fsdp": 2, "sequence": 2, "tensor": 2}),
        r"sequence \(2\) .* tensor \(2\), not both",
    )
    keys = {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}
    yield config_of({"fsdp": 2}, **keys), r"sequence_parallel_size = 2: .* not both.*stage\": 3"
    groups = config_of({"fsdp": 4}, sequence_parallel_size=2, stage=3)
    groups["zero_optimization"]["zero_hpz_partition_size"] = 2
    yield groups, "axis sequence together are not supported"
    yield config_of({"fsdp": 8, "sequence": 3}), "the sizes multiply to 24"


@pytest.mark.parametrize("case", range(6))
def test_what_does_not_fit_is_refused_with_the_numbers(case: int) -> None:
    config, said = [*refusals()][case]
    with pytest.raises(SpmdZeroConfigError, match=said):
        spmdzero.initialize(model=llama(), config=config)


class Attends(nn.Module):
    """Attention of a number of heads that isn't in a config."""

    def __init__(self, heads: int, own: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, heads * 4), nn.Linear(16, own * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = (made.unflatten(-1, (-1, 4)).transpose(1, 2) for made in (self.q(x), self.kv(x)))
        out = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
        return (out.transpose(1, 2).flatten(2) - x.sum((1, 2), keepdim=True)).square().mean()


class Projects(nn.Module):
    """A product with a weight `[in, out]`, as of `Conv1D`, whose gradient is x.T @ grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16, 24)), nn.Parameter(torch.zeros(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.addmm(self.bias, x.view(-1, 16), self.weight).view(*x.shape[:2], 24)
        return (made * made.sin()).mean()


def test_rows_of_a_transposed_product_stay_divided() -> None:
    engine, *_ = spmdzero.initialize(model=Projects(), config=config_of(MESH))
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([(torch.randn(ROWS, LENGTH, 16),)]))
    within = ledgers.boundary.of_role("sequence")
    assert {c.kind for c in within} == {"all-reduce"}
    assert {c.shape for c in within} == {(), (24,), (16, 24)}


def attended(mesh: dict[str, int], heads: int, own: int) -> list[float]:
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(model=Attends(heads, own), config=config_of(mesh))
    x = torch.randn(ROWS, 16, 16, generator=torch.Generator().manual_seed(1))
    return [engine.train_batch(iter([(x,)])).item() for _ in range(3)]


def test_heads_of_keys_are_repeated_and_others_are_refused() -> None:
    mesh = {"fsdp": 2, "sequence": 4}
    torch.testing.assert_close(attended(mesh, 8, 2), attended({"fsdp": 8}, 8, 2), **CLOSE)
    with pytest.raises(ReplicaRegionError, match="attention of 6 heads, and 2 of keys"):
        attended(mesh, 6, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_by_name(stage: int) -> None:
    assert_gradients_are_those_of_one_axis(MESH, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["train_batch", "three calls"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "mesh",
    [MESH, {"fsdp": 2, "sequence": 4}, {"data": 2, "fsdp": 2, "sequence": 2}],
    ids=str,
)
def test_all_stages_and_calls(mesh: dict[str, int], stage: int, calls: str) -> None:
    plain = trained(started({"fsdp": 8}, stage=stage), 20, calls=calls)
    found = trained(started(mesh, stage=stage), 20, calls=calls)
    assert_same(found, plain)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=64, n_embd=WIDTH, n_layer=4, n_head=8,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "spmd"),
    [
        (2, {}),
        (2, {"recompute": "everything"}),
        (2, {"scan": "on"}),
        (3, {"scan": "on"}),
        (2, {"fused_loss": True}),
        (2, {"attention": "kernel"}),
    ],
    ids=str,
)
def test_gpt2_with_what_saves_memory(stage: int, spmd: dict[str, Any]) -> None:
    found = [
        trained(started(mesh, stage=stage, spmd=spmd, model=gpt2()), 6)
        for mesh in ({"fsdp": 8}, MESH)
    ]
    assert_same(*found)


@pytest.mark.slow
def test_a_loop_of_equal_blocks_keeps_rows_divided() -> None:
    engine = started(MESH, spmd={"scan": "on"}, model=gpt2())
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([batch(9)]))
    ledger = ledgers.boundary
    within = ledger.of_role("sequence")
    assert ledger.activations == ()
    assert {c.kind for c in within} == {"all-to-all", "all-reduce"}
    # Forward, the same again in the loop of the backward, and backward: two in each.
    assert sum(c.kind == "all-to-all" for c in within) == 3 * 2


@pytest.mark.slow
def test_gradient_accumulation() -> None:
    found = []
    for mesh in ({"fsdp": 8}, MESH):
        engine = started(mesh, gradient_accumulation_steps=2)

        found.append([])
        for step in range(4):
            rows = (batch(2 * step), batch(2 * step + 1))
            found[-1].append(engine.train_batch(iter(rows)).item())
    torch.testing.assert_close(found[1], found[0], **CLOSE)
