"""Explaining what no memory here could hold: the same answer as with data, and no data."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero import Explanation, SpmdZeroUsageError, replicated
from spmdzero.explain import ProgramLedger, Topology, trace_ahead
from spmdzero.explain._without_data import with_values
from tests.support import contract
from tests.support.processes import environment, run_python
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.backends("jax")

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


def explained(*arguments: str, **more: str) -> tuple[Explanation, str]:
    """What `spmdzero explain` says on the machine's shell, and its progress."""
    done = subprocess.run(
        [sys.executable, "-m", "spmdzero", "explain", *arguments, "--json"],
        cwd=ROOT, env=environment(PYTHONPATH=str(ROOT), **more), capture_output=True, text=True,
        timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout)
    return Explanation.from_json(json.dumps(found)), done.stderr


def test_a_meta_model_without_a_topology_is_refused_with_one(mesh: object) -> None:
    with torch.device("meta"):
        model = contract.GPT()
    with pytest.raises(SpmdZeroUsageError, match=r'meta device.*tpu=\["v5p:4x4x4"\]'):
        spmdzero.explain(model, CONFIG, contract.make_batch(0, 0))


@pytest.mark.slow
def test_a_batch_of_shapes_is_explained_as_one_of_values(mesh: object) -> None:
    def explanation(x: torch.Tensor) -> Explanation:
        return spmdzero.explain(Squares(), CONFIG, {"input": x}, stages=())

    real = torch.randn(8, 16, dtype=torch.bfloat16)
    found = explanation(real.to("meta"))
    expected = explanation(real)
    assert found.fits == expected.fits
    assert (found.tokens, found.audit.findings) == (expected.tokens, expected.audit.findings)


class Squares(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


READS = """
import torch, spmdzero
class Reads(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x).square().mean()
        print(y)
        return y if y.item() > 0 else -y
with torch.device("meta"):
    model, x = Reads(4, 4), torch.empty(2, 4)
try:
    spmdzero.explain(model, {"train_micro_batch_size_per_gpu": 1}, x, tpu=["v5e:1x2"])
except spmdzero.SpmdZeroError as error:
    print(type(error).__name__, error)
"""


def test_reading_what_has_no_value_is_shown_as_such_or_refused_in_words() -> None:
    # XLA ended the process at each.
    shown, refused = run_python("-c", READS, devices=2).splitlines()
    assert shown == "tensor without data (shape=[], dtype=torch.float32, device='xla:0')"
    assert refused.startswith("ReplicaRegionError")
    assert "Python reads a value here, and a model on the meta device" in refused


def test_made_up_values_are_indices_and_draws_and_leave_real_ones_alone() -> None:
    meta, real = torch.device("meta"), torch.ones(2)
    with meta:  # where a meta model was made, a batch is made too
        tokens, mask = torch.empty(4, 3, dtype=torch.int64), torch.empty(4, dtype=torch.bool)
        noise, table = torch.empty(4, 3, dtype=torch.bfloat16), torch.empty(5)
        filled = with_values(
            {"tokens": tokens, "more": [mask, noise], "table": replicated(table), "real": real}
        )
    assert torch.equal(filled["tokens"], torch.zeros(4, 3, dtype=torch.int64))
    assert torch.equal(filled["more"][0], torch.zeros(4, dtype=torch.bool))
    assert filled["more"][1].dtype == torch.bfloat16
    assert filled["more"][1].float().std() > 0.5
    assert filled["table"].tensor.device.type == "cpu"
    assert filled["real"] is real


def test_an_engine_that_runs_refuses_a_batch_without_values(mesh: object) -> None:
    message = r"'input' of shape \[8, 16\] is on meta, where it has no values"
    x = torch.empty(8, 16, device="meta")
    for call in ("__call__", "train_batch", "explain"):
        engine, *_ = spmdzero.initialize(model=Squares(), config=CONFIG)
        with pytest.raises(SpmdZeroUsageError, match=message):
            getattr(engine, call)(iter([x] * 2) if call == "train_batch" else x)


def collectives(explanation: Explanation) -> dict[str, list[Any]]:
    """What each program moves, without the names of operations."""

    def nameless(program: ProgramLedger) -> list[Any]:
        moved = program.ledger.collectives
        return [dataclasses.replace(c, op_name="", source="") for c in moved]

    return {p.kind: nameless(p) for p in explanation.moves_on("v5e:2x4").programs}


@pytest.mark.slow
def test_a_model_without_data_compiles_to_the_program_of_one_with_data(mesh: object) -> None:
    def explanation(model: nn.Module, batch: Any) -> Explanation:
        return spmdzero.explain(model, CONFIG, batch, tpu=["v5e:2x4"], stages=())

    batch = contract.make_batch(0, 0)
    with torch.device("meta"):
        hollow = contract.GPT()
    real = explanation(contract.make_model(), batch)
    without = explanation(hollow, tuple(tensor.to("meta") for tensor in batch))
    assert all(parameter.is_meta for parameter in hollow.parameters())
    assert collectives(without) == collectives(real)
    assert without.fit_at(2).compiled == real.fit_at(2).compiled[1:]
    assert (without.audit.steps, without.audit.findings) == (0, ())
    assert "Nothing was trained" in str(without)
    # What was traced without data is gone: the process goes on to train.
    engine, *_ = spmdzero.initialize(model=contract.make_model(), config=CONFIG)
    loss = engine.train_batch(iter([contract.make_batch(0, 0)] * 2))
    assert torch.isfinite(loss.cpu())


class Wide(nn.Module):
    """6.4 billion parameters in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(80_000, 80_000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


@pytest.mark.slow
def test_a_step_that_a_chip_has_no_room_for_is_told_by_how_much(mesh: object) -> None:
    with torch.device("meta"):
        model = Wide()
    config: dict[str, Any] = CONFIG | {"gradient_accumulation_steps": 1}
    batch = torch.zeros(8, 80_000, dtype=torch.bfloat16)
    explanation = spmdzero.explain(model, config, batch, tpu=["v5e:2x4"], stages=())
    (memory,) = explanation.fit_at(2).compiled
    # Parameters and a whole gradient, 12.8 GB each, are more than the chip's 16 GiB.
    assert memory.memory.arguments is None
    assert memory.memory.peak > 2 * 12.8e9
    assert memory.fits is False
    assert explanation.moves == ()
    (problem,) = explanation.problems
    assert problem.startswith("v5e:2x4: stage 2 needs ")
    assert "NO" in str(explanation)
    (verdict,) = explanation.verdicts
    assert verdict.fits is False
    assert verdict.parameters == 2 * 80_000**2
    assert str(explanation).startswith("Doesn't fit v5e:2x4: ")


@pytest.mark.slow
def test_one_layer_of_a_7b_model_is_explained_for_64_chips_without_being_materialised() -> None:
    batch = [f"--batch={name}={{devices}}x2048:int64" for name in ("tokens", "labels")]
    explanation, progress = explained(
        "examples.llama:llama_7b_of_1_layer", "examples/llama_7b.json", "--meta", "--own-stage",
        *batch, "--tpu", "v5p:4x4x4",
    )  # fmt: skip
    fit, moves = explanation.fit_at(2), explanation.moves_on("v5p:4x4x4")
    (memory,) = fit.compiled
    assert (explanation.devices, memory.fits) == (64, True)
    assert memory.memory.arguments == pytest.approx(fit.states, rel=0.03)
    assert moves.activations == ()
    assert [moves.target for moves in explanation.moves] == ["v5p:4x4x4"]
    assert "explain: stage 2, boundary program for v5p:4x4x4" in progress
    # By `_passes`, with nothing of spmdzero in memory.
    assert progress.count("explain: compiling for v5p:4x4x4 took") == 1


MANY = """
import torch, spmdzero
class Squares(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()
try:
    spmdzero.explain(Squares(4, 4), {"train_micro_batch_size_per_gpu": 1}, torch.ones(4096, 4))
except spmdzero.SpmdZeroError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_more_devices_than_a_cpu_can_be_are_traced_only() -> None:
    # JAX's answer was "Multiprocess computations aren't implemented on the CPU backend".
    refused = run_python("-c", MANY, devices=4096)
    assert refused.startswith("SpmdZeroUsageError 4,096 devices can't be virtual ones")
    explanation, _ = explained(
        "examples.llama:llama_7b_of_1_layer", "examples/llama_7b.json", "--meta", "--own-stage",
        *(f"--batch={name}={{devices}}x2048:int64" for name in ("tokens", "labels")),
        "--tpu", "v5p:16x16x16",
    )  # fmt: skip
    fit, moves = explanation.fit_at(2), explanation.moves_on("v5p:16x16x16")
    (memory,) = fit.compiled
    assert (explanation.devices, memory.fits) == (4096, True)
    assert memory.memory.arguments == pytest.approx(fit.states, rel=0.03)
    assert moves.activations == ()


def test_the_example_has_7_billion_parameters() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from examples.llama import llama_7b
    finally:
        sys.path.remove(str(ROOT))
    with torch.device("meta"):
        model = llama_7b()
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
    assert Path(ROOT, "examples/llama_7b.json").is_file()


class Looks(nn.Module):
    """Reads a value of its input, of which there is one, before it uses the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made = self.head(self.embed(tokens))
        steps = tokens[:, 1:] - tokens[:, :-1]
        if not (steps.cumsum(-1)[:, -1] == 0).all():
            raise ValueError("the rows are packed")
        return nn.functional.cross_entropy(made.flatten(0, 1), tokens.flatten())


def test_what_a_forward_reads_takes_no_memory_of_what_is_still_to_be_traced(mesh: object) -> None:
    # transformers reads positions so in each forward: the second micro-batch found none.
    with torch.device("meta"):
        model = Looks()
    topology = Topology.parse("v5e:2x4")
    step = trace_ahead(model, CONFIG, torch.zeros(8, 16, dtype=torch.long), topology)
    assert [program.kind for program in step.programs] == ["micro", "boundary"]
