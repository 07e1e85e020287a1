"""Training on JAX: DeepSpeed's recorded numbers, shards, collectives, programs, refusals."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import arrays, counters, current, flags
from spmdzero.errors import ReplicaRegionError
from spmdzero.hlo import parse
from tests.engine.test_trajectories import CASES, assert_follows
from tests.support.engines import start
from tests.support.trajectory import case_of, recording, run

ROWS = 32
# One of each stage, precision and way of accumulating; the rest takes long.
QUICK = ("z0_w2_fp32_gas4", "z1_w2_bf16_gacc32_gas4", "z2_w2_fp16dyn_gas1")


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), y)


def engine_of(model: nn.Module, *, stage: int = 2, **config: object) -> spmdzero.Engine:
    rows = {"train_micro_batch_size_per_gpu": ROWS // 8}
    return start(model, **rows | {"zero_optimization": {"stage": stage}} | config)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(ROWS, 64, generator=generator) for _ in range(2))


def test_this_process_computes_with_jax() -> None:
    assert current().name == "jax"


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def test_a_training_is_deepspeeds(name: str) -> None:
    (ours,) = run([case_of(name)], devices=2)
    assert_follows(ours["records"], recording(name)["records"], CASES[name])


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2]
)
def test_both_styles_train_as_torch_does_and_a_captured_step_compiles_nothing(stage: int) -> None:
    torch.manual_seed(0)
    module = Regression()
    plain = copy.deepcopy(module)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    engine = engine_of(module, stage=stage)
    compiled = None
    for step in range(8):
        x, y = batch(step)
        if step < 2:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
        else:
            loss = engine.train_batch(iter([(x, y)]))
        if step == 5:
            compiled = counters.compiled()[0]
        theirs = plain(x, y)
        adam.zero_grad()
        theirs.backward()
        adam.step()
        # Sums in another order, in fp32.
        assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert counters.compiled()[0] == compiled
    for (name, mine), other in zip(
        engine.module.named_parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(
            mine.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5, msg=name
        )


def test_states_are_shards_and_the_compiled_program_scatters_gradients() -> None:
    engine = engine_of(Regression(), spmd={"reduction": "explicit"})
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([batch(0)]))
    moved = [c for c in ledgers.boundary.collectives if c.role in ("gradient", "parameter")]
    kinds = {(c.role, c.kind) for c in moved}
    assert ("gradient", "reduce-scatter") in kinds
    assert ("parameter", "all-gather") in kinds
    assert not [c for c in ledgers.boundary.collectives if c.role == "untagged"]
    weight = engine.module.layers[0].weight
    moment = engine.optimizer.state[weight]["exp_avg"]
    assert {shard.numel() for shard in arrays.local_shards(moment)} == {weight.numel() // 8}
    assert {shard.numel() for shard in arrays.local_shards(weight)} == {weight.numel()}


def test_what_a_step_leaves_alone_is_no_output_of_its_program() -> None:
    class Normed(Regression):
        def __init__(self) -> None:
            super().__init__()
            # Its input wants no gradient.
            self.norm = nn.BatchNorm1d(64)
            self.layers[0].weight.requires_grad_(False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x), y)

    engine, found = engine_of(Normed()), list[str]()
    returned: list[tuple[str, ...]] = []
    with engine.observe(lambda graph: (returned.append(graph.returned), found.append(graph.hlo()))):
        engine.train_batch(iter([batch(0)]))
    (names,), (text,) = returned, found
    root = next(i for i in parse(text).computations[parse(text).entry].values() if i.is_root)
    assert len(root.operands) == len(names)
    assert "parameter/layers.0.weight" not in names
    assert {"parameter/norm.weight", "buffer/norm.running_mean", "loss/0"} <= {*names}


def test_replicas_drop_other_elements_and_a_seed_repeats_them() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x * self.weight, 0.5)

    engine, ones = engine_of(Dropped()), torch.ones(ROWS, 64)
    torch.manual_seed(7)
    first = engine(ones).detach().cpu()
    torch.manual_seed(7)
    again = engine(ones).detach().cpu()
    assert torch.equal(first, again)
    assert len(first.reshape(8, -1).unique(dim=0)) == 8
    # Half of 2,048 is kept, with a standard deviation of 23; five of them either way.
    assert abs(int((first != 0).sum()) - ROWS * 32) < 5 * 23


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    engine = engine_of(Regression())
    for step in range(3):
        engine.train_batch(iter([batch(step)]))
    engine.save_checkpoint(str(tmp_path))
    expected = [engine.train_batch(iter([batch(step)])).item() for step in (3, 4)]
    other = engine_of(Regression())
    other.load_checkpoint(str(tmp_path))
    assert [other.train_batch(iter([batch(step)])).item() for step in (3, 4)] == expected


def test_a_number_that_changes_at_each_step_makes_two_programs_and_the_loss_of_each() -> None:
    engine = engine_of(Regression())
    counts = []
    for step in range(5):
        scale, shift = 0.1 + step, 0.3 / (step + 1)
        plain = engine(*batch(step))
        loss = plain * scale + shift
        engine.backward(loss)
        engine.step()
        # One rounding of fp32 in each of two operations.
        assert loss.item() == pytest.approx(plain.item() * scale + shift, rel=3e-7)
        counts.append(counters.compiled()[0])
    assert counts[1] > counts[0]
    assert counts[2:] == [counts[2]] * 3


def test_autocast_is_on_by_the_tensors_device_and_off_where_a_model_turns_it_off() -> None:
    class Asking(Regression):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found.append(torch.is_autocast_enabled(x.device.type))
            found.append(self.layers[0](x).dtype)
            with torch.autocast(x.device.type, enabled=False):
                found.append(self.layers[0](x).dtype)
            return super().forward(x, y)

    found: list[object] = []
    engine = engine_of(Asking(), torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine.train_batch(iter([batch(0)]))
    assert found[:3] == [True, torch.bfloat16, torch.float32]


def test_on_the_cpu_a_set_of_flags_is_said_once_to_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        # Of the TPU compiler's flags libtpu alone knows the names: XLA for the CPU would raise.
        engine = engine_of(Regression(), spmd={"xla_flags": "v5e"})
        engine.train_batch(iter([batch(0)]))
    (said,) = (line for line in caplog.messages if "xla_flags" in line)
    assert "has no effect here" in said
    assert flags.in_force() == {}


def test_replicas_that_disagree_on_a_value_that_python_reads_are_refused() -> None:
    class Branching(Regression):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) * (2 if x.sum() > 0 else 1)

    engine = engine_of(Branching())
    x, y = batch(0)
    with pytest.raises(ReplicaRegionError, match=r"test_training\.py.*the replicas disagree"):
        engine(x, y)
