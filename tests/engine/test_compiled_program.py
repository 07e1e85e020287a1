"""What the compiler made of a step: collectives, donation, number of programs."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.inspect import StepLedgers
from tests.support import engines
from tests.support.contract import make_batch, make_model
from tests.support.models import KINDS, Kind, ResNet, small_gpt2
from tests.support.processes import run_python
from tests.support.selected import outside

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS = 8


def config(stage: int, gas: int = 1, **spmd: Any) -> dict[str, Any]:
    return engines.config(
        gradient_accumulation_steps=gas, zero_optimization={"stage": stage}, spmd=spmd
    )


def ledgers_of(
    model: nn.Module, call: Callable[[spmdzero.Engine, int], torch.Tensor], cfg: dict[str, Any]
) -> tuple[spmdzero.Engine, StepLedgers]:
    engine, *_ = spmdzero.initialize(model=model, config=cfg)
    with spmdzero.record_ledgers(engine) as ledgers:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(call(engine, micro))
            engine.step()
    return engine, ledgers


def gpt_loss(engine: spmdzero.Engine, micro: int) -> torch.Tensor:
    return engine(*make_batch(0, micro))


def large(engine: spmdzero.Engine) -> set[str]:
    return {n for n, p in engine.module.named_parameters() if p.numel() >= 2048}


def names(engine: spmdzero.Engine) -> set[str]:
    return {n for n, _ in engine.module.named_parameters()}


class TestStages:
    def test_stage_0_reduces_each_gradient_once_and_gathers_nothing(self) -> None:
        engine, ledgers = ledgers_of(make_model(layers=1), gpt_loss, config(0))
        gradients = ledgers.boundary.of_role("gradient")
        assert sorted(c.tensor for c in gradients) == sorted(names(engine))
        assert {c.kind for c in gradients} == {"all-reduce"}
        assert not any(c.scattered for c in gradients)
        assert ledgers.boundary.of_role("parameter") == ()
        assert ledgers.boundary.activations == ()

    @pytest.mark.parametrize("reduction", ["annotated", "explicit"])
    def test_stage_2_scatters_each_large_gradient_and_gathers_its_parameter(
        self, reduction: str
    ) -> None:
        engine, ledgers = ledgers_of(make_model(layers=1), gpt_loss, config(2, reduction=reduction))
        gradients = ledgers.boundary.of_role("gradient")
        assert sorted(c.tensor for c in gradients) == sorted(names(engine))
        assert {c.tensor for c in gradients if c.scattered} == large(engine)
        # CPU has no pass that makes one from an annotation: it shows as all-reduce and slice.
        face = "reduce-scatter" if reduction == "explicit" else "all-reduce"
        assert {c.kind for c in gradients if c.scattered} == {face}
        gathers = ledgers.boundary.of_role("parameter")
        assert sorted(c.tensor for c in gathers) == sorted(large(engine))
        assert {c.kind for c in gathers} == {"all-gather"}
        assert [c.is_scalar for c in ledgers.boundary.of_role("norm")] == [True]
        assert ledgers.boundary.activations == ()

    def test_stage_2_with_two_micro_batches_reduces_at_each(self) -> None:
        engine, ledgers = ledgers_of(make_model(layers=1), gpt_loss, config(2, gas=2))
        for ledger in (ledgers.micro, ledgers.boundary):
            scattered = {c.tensor for c in ledger.of_role("gradient") if c.scattered}
            assert scattered == large(engine)
            assert ledger.activations == ()
        assert ledgers.micro.of_role("parameter") == ()

    def test_stage_1_with_four_micro_batches_reduces_once(self) -> None:
        engine, ledgers = ledgers_of(make_model(layers=1), gpt_loss, config(1, gas=4))
        # The one scalar is the loss's mean over replicas.
        assert [(c.role, c.is_scalar) for c in ledgers.micro.collectives] == [("output", True)]
        gradients = ledgers.boundary.of_role("gradient")
        assert sorted(c.tensor for c in gradients) == sorted(names(engine))
        assert {c.tensor for c in gradients if c.scattered} == large(engine)
        assert sorted(c.tensor for c in ledgers.boundary.of_role("parameter")) == sorted(
            large(engine)
        )
        assert ledgers.boundary.activations == ()

    def test_two_axes_scatter_over_fsdp_and_sum_over_data(self) -> None:
        engine, ledgers = ledgers_of(
            make_model(layers=1), gpt_loss, config(2, mesh={"data": 2, "fsdp": -1})
        )
        gradients = ledgers.boundary.of_role("gradient")
        scattered = [c for c in gradients if c.kind == "reduce-scatter"]
        assert {c.tensor for c in scattered} == large(engine)
        assert {c.group_size for c in scattered} == {4}
        whole = {c.tensor: c.bytes for c in scattered}
        summed = [c for c in gradients if c.kind == "all-reduce" and c.tensor in whole]
        assert {c.group_size for c in summed} == {2}
        assert {c.tensor: 4 * c.bytes for c in summed} == whole
        assert ledgers.boundary.activations == ()


class Narrowing(nn.Module):
    """A weight whose last dim is the longest: `[64, 2048]`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(self.up(x).relu()), x)


def program_of(model: nn.Module, width: int, cfg: dict[str, Any]) -> str:
    """The optimised HLO of a step on `[ROWS, width]`."""
    engine, *_ = spmdzero.initialize(model=model, config=cfg)
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        engine.train_batch(iter([torch.ones(ROWS, width)]))
    return texts[0]


def test_no_gathered_weight_is_transposed() -> None:
    text = program_of(Narrowing(), 64, config(2))
    gathered = re.findall(r"= f32\[(\d+,\d+)\]\{(\d,\d)\} all-gather\(", text)
    # Along the last dim, XLA gathers column-major, and copies to row-major.
    assert sorted(gathered) == [("2048,64", "1,0"), ("64,2048", "1,0")]


class Deep(nn.Module):
    """Twelve layers, whose activations are small beside their weights `[128, 128]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), x)


@pytest.mark.parametrize(
    ("stage", "forward"),
    [pytest.param(1, "region", marks=pytest.mark.slow), (2, "region"), (2, "global")],
)
def test_whole_gradients_are_not_kept_until_the_update(stage: int, forward: str) -> None:
    text = program_of(Deep(), 128, config(stage, forward=forward))
    schedule = text.partition("\nENTRY")[2].splitlines()
    whole = re.compile(r"%(\S+) = f32\[128,128\]\S* all-reduce\(")
    sums = [(i, found[1]) for i, line in enumerate(schedule) if (found := whole.search(line))]
    assert len(sums) == 12
    read = {name: re.compile(rf"%{name}\b") for _, name in sums}
    last = {
        name: max(i for i, line in enumerate(schedule) if read[name].search(line)) for name in read
    }
    alive = [sum(made <= i < last[name] for made, name in sums) for i in range(len(schedule))]
    # One, and another while it is cut; without care for it all twelve.
    assert max(alive) <= 2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.norm = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.layer(x).mean(1))), y)


def masked(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 128, (rows, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


FAMILIES = {
    "BatchNorm CNN": Kind(lambda: ResNet(16), KINDS["resnet"].batch),
    "TransformerEncoderLayer": Kind(
        Encoder, lambda rows: (torch.randn(rows, 6, 32), torch.arange(rows))
    ),
    "transformers GPT-2": Kind(small_gpt2, masked),
    "transformers BERT": KINDS["bert"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=outside(list(FAMILIES)[:2], n)) for n in FAMILIES]
)
def test_no_collective_serves_an_activation(name: str) -> None:
    def loss_of(engine: spmdzero.Engine, _: int) -> torch.Tensor:
        batch = FAMILIES[name].batch(ROWS)
        out = engine(**batch) if isinstance(batch, dict) else engine(*batch)
        return getattr(out, "loss", out)

    torch.manual_seed(0)
    engine, ledgers = ledgers_of(FAMILIES[name].model(), loss_of, config(2))
    ledger = ledgers.boundary
    assert ledger.activations == ()
    assert sorted(c.tensor for c in ledger.of_role("gradient")) == sorted(names(engine))
    assert {c.tensor for c in ledger.of_role("parameter")} == large(engine)
    roles = {"gradient", "parameter", "norm", "output", "buffer"}
    assert {c.role for c in ledger.collectives} <= roles


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.layer(x)
        return F.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


@pytest.mark.parametrize(
    ("model", "loss_of"),
    [
        # JAX's layer norm keeps rows apart.
        pytest.param(
            functools.partial(make_model, layers=1),
            gpt_loss,
            marks=pytest.mark.backends("torch_xla"),
            id="layer norm",
        ),
        pytest.param(
            Contrastive, lambda engine, _: engine(torch.randn(ROWS, 16)), id="rows that mix"
        ),
    ],
)
def test_propagation_does_gather_activations(
    model: Callable[[], nn.Module], loss_of: Callable[..., torch.Tensor]
) -> None:
    """Why the region exists; and a proof that the ledger would see a leak."""
    _, ledgers = ledgers_of(model(), loss_of, config(2, forward="global"))
    assert "all-gather" in {c.kind for c in ledgers.boundary.activations}


def test_every_state_buffer_is_donated() -> None:
    torch.manual_seed(1)
    engine, *_ = spmdzero.initialize(model=make_model(layers=1), config=config(2, gas=2) | {
        "bf16": {"enabled": True}, "gradient_clipping": 0.5,
    })  # fmt: skip
    for micro in range(2):
        # As no other test's loss is made: donation is counted when a program is compiled.
        engine.backward(gpt_loss(engine, micro).expm1())
        engine.step()
    states = [n for n in engine.named_tensors() if not n.startswith("counter/")]
    # Parameters, accumulators, masters, two moments of each of 17 tensors; the rest is counters.
    assert len(states) == 5 * 17
    assert engine.donated_inputs["boundary"] >= len(states)
    assert engine.donated_inputs["micro"] >= 17


PROGRAM = """
import json, torch, spmdzero
from spmdzero.backend import counters, runtime
from tests.support import engines
from tests.support.contract import make_batch, make_model
engine, *_ = spmdzero.initialize(model=make_model(layers=1), config={
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_num_steps": 10, "total_num_steps": 45, "warmup_max_lr": 1e-3}},
    "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
})
counts, rates = [], []
for step in range(50):
    for micro in range(2):
        loss = engine(*make_batch(step, micro))
        engine.backward(loss)
        engine.step()
    loss.item(), engine.get_global_grad_norm()
    counts.append(counters.compiled()[0])
    rates.append(engine.get_lr()[0])
cnn, *_ = spmdzero.initialize(
    model=torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Dropout(0.1)
    ),
    config={
        "train_micro_batch_size_per_gpu": 4, "steps_per_print": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    },
)
with_buffers = []
for step in range(10):
    cnn.backward(cnn(torch.randn(8, 1, 6, 6)).pow(2).mean())
    cnn.step()
    cnn.optimizer.zero_grad()
    with_buffers.append(counters.compiled()[0] - counts[-1])
print(json.dumps([counts, rates, with_buffers]))
"""


@pytest.mark.slow
def test_each_kind_of_program_compiles_once_in_50_steps_of_a_changing_lr() -> None:
    printed = run_python("-W", "error", "-c", PROGRAM, devices=2)
    counts, rates, with_buffers = json.loads(printed.splitlines()[-1])
    assert len(set(rates)) > 40
    # The initial states, a micro-batch, the boundary.
    assert counts == [3] * 50
    # The boundary: plain SGD has no initial states. Dropout's keys, buffers of batch norm, the
    # check of its integer one, print steps and a superfluous zero_grad make no program either.
    assert with_buffers == [1] * 10
