"""An explanation on the CPU, from the model to its tables."""

import json
import logging
import re
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero import Explanation, SpmdZeroUsageError
from spmdzero.explain import _passes
from spmdzero.explain._explain import _name_the_loop
from spmdzero.plan import Role, sized
from tests.audit.models import GLOBAL, GrowsByItself, MixesRows, ReadsValue, batches
from tests.audit.models import config as audited_config
from tests.support.contract import DIM, VOCAB, make_batch

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")


class Words(nn.Module):
    """A language model of the batch's tokens that takes a compiler little."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.down(F.gelu(self.up(self.embed(x))))
        return F.cross_entropy(self.head(z).float().flatten(0, 1), y.flatten())


def make_model() -> Words:
    torch.manual_seed(0)
    return Words()


PSI = sum(p.numel() for p in make_model().parameters())


def config(stage: int = 2, micro_batches: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        **more,
    }


@pytest.fixture(scope="module")
def explained() -> tuple[Explanation, torch.nn.Module]:
    model = make_model()
    return spmdzero.explain(model, config(), make_batch(0, 0)), model


@pytest.fixture(scope="module")
def explanation(explained: tuple[Explanation, torch.nn.Module]) -> Explanation:
    return explained[0]


def test_the_model_stays_as_it_was(explained: tuple[Explanation, torch.nn.Module]) -> None:
    fresh = dict(make_model().named_parameters())
    for name, parameter in explained[1].named_parameters():
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, fresh[name])


def test_compilers_paper_and_deepspeed_count_the_same_states(explanation: Explanation) -> None:
    *compiled, third = explanation.fits
    # It is compiled where the config asks for it: torch_xla can't.
    assert third.compiled == ()
    for fit in compiled:
        (cpu,) = fit.compiled
        assert cpu.target == "cpu:8"
        # Beside the states, an input is the batch, or a scalar such as the learning rate.
        assert fit.states <= cpu.memory.arguments <= 1.03 * fit.states
        assert cpu.memory.peak > cpu.memory.arguments
        assert (cpu.hbm_bytes, cpu.fits) == (None, None)
    papers = [fit.paper for fit in explanation.fits]
    assert papers == [16 * PSI, round(5.5 * PSI), round(3.75 * PSI), 2 * PSI]
    # 2Ψ + 18Ψ/N (DeepSpeed's runtime/zero/stage_1_and_2.py).
    estimates = [fit.deepspeed for fit in explanation.fits]
    assert estimates == [None, None, 2 * PSI + int(18 * PSI / 8), None]
    # Stage 2 shards the accumulator.
    accumulators = [fit.plan[Role.ACCUMULATOR] for fit in explanation.fits]
    assert accumulators[0] == accumulators[1] > 4 * accumulators[2]


def test_a_step_moves_what_its_programs_move_and_no_activation(explanation: Explanation) -> None:
    moves = explanation.moves_on("cpu:8")
    # Each micro-batch, and then the boundary.
    assert [(p.kind, p.runs) for p in moves.programs] == [("micro", 1), ("boundary", 1)]
    assert moves.wire_bytes == sum(p.runs * p.ledger.wire_bytes for p in moves.programs)
    # Two reductions of 2Ψ and a gather of Ψ, where two of Ψ and the gather were enough.
    assert moves.over_floor == pytest.approx(5 / 3, rel=0.03)
    assert moves.activations == ()
    large = {n for n, p in make_model().named_parameters() if p.numel() >= 2048}
    assert {refused.tensor for refused in moves.refused} == large
    assert all("CPU compiler" in refused.reason for refused in moves.refused)
    with pytest.raises(SpmdZeroUsageError, match="only for cpu:8"):
        explanation.moves_on("v5e:2x4")


def test_every_chip_has_its_times(explanation: Explanation) -> None:
    assert [line.target for line in explanation.rooflines] == ["v4", "v5e", "v5p", "v6e", "tpu7x"]
    # 2 micro-batches of 32 positions a device.
    assert explanation.tokens == 64
    assert {line.bound for line in explanation.rooflines} == {"network"}


def test_json_reads_back_as_the_same_explanation_and_other_json_is_refused(
    explanation: Explanation,
) -> None:
    assert Explanation.from_json(explanation.to_json()) == explanation
    assert json.loads(explanation.to_json())["stage"] == 2
    with pytest.raises(SpmdZeroUsageError, match="not the JSON text of an explanation"):
        Explanation.from_json("{}")


def test_text_answers_the_four_questions_in_order(explanation: Explanation) -> None:
    text = str(explanation)
    assert re.findall(r"^\d\. .*?\?", text, re.MULTILINE) == [
        "1. Does it fit?",
        "2. What moves?",
        "3. What is wrong?",
        "4. What does a step wait for?",
    ]
    assert sized(16 * PSI) in text
    # Its tables and findings are those of tests/unit/test_show.py.
    page = explanation.to_html()
    assert page.startswith("<!doctype html>")
    assert explanation._repr_html_() in page
    assert "color-scheme: light dark" in page


def test_a_leak_is_a_problem_and_an_activation_with_its_name() -> None:
    # More rows, as below.
    cfg = audited_config(**GLOBAL, train_micro_batch_size_per_gpu=2)
    leaking = spmdzero.explain(MixesRows(), cfg, torch.cat(batches(2)), stages=())
    assert leaking.moves_on("cpu:8").activations
    subjects = {finding.subject for finding in leaking.audit.of("stray-activation-collective")}
    leak = "aten::mm in module mixed"
    assert leak in subjects
    assert any(leak in problem for problem in leaking.problems)
    for shown in (str(leaking), leaking.to_html()):
        assert f"stray-activation-collective: {leak}" in shown
        assert "all-gather" in shown.partition("4. What does a step wait for?")[0]
    assert "activation: all-" in str(leaking)


def test_a_sound_step_is_audited_over_three_steps_and_has_no_problem(
    explanation: Explanation,
) -> None:
    assert (explanation.audit.steps, explanation.audit.findings) == (3, ())
    assert explanation.audit.programs == ("micro", "boundary")
    assert explanation.problems == ()
    assert "nothing found" in str(explanation)


def test_a_recompilation_and_a_host_read_are_found_in_the_steps_that_explain_trains() -> None:
    # More rows: other programs than those that the audit's own tests left in the cache.
    rows, cfg = torch.cat(batches(2)), audited_config()
    cfg["train_micro_batch_size_per_gpu"] *= 2
    found = spmdzero.explain(GrowsByItself(), cfg, rows, stages=())
    assert [f.name for f in found.audit.findings] == ["recompilation"]
    found = spmdzero.explain(ReadsValue(), audited_config(), batches(1)[0], stages=())
    assert any("(in the model)" in f.subject for f in found.audit.of("host-read-in-step"))


def test_an_engine_explains_its_own_stage_by_training_one_step() -> None:
    engine, *_ = spmdzero.initialize(model=make_model(), config=config(stage=1))
    explanation = engine.explain(*make_batch(0, 0))
    assert engine.global_steps == 1
    assert [len(fit.compiled) for fit in explanation.fits] == [0, 1, 0, 0]
    micro, boundary = explanation.moves_on("cpu:8").programs
    assert [c.role for c in micro.ledger.collectives] == ["output"]
    assert boundary.ledger.of_role("gradient")


@pytest.mark.backends("jax")
def test_many_equal_blocks_are_told_of_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        _name_the_loop(nn.Sequential(*(nn.Linear(4, 4) for _ in range(7))))
        assert not caplog.records
        _name_the_loop(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)), nn.Linear(4, 2)))
    assert caplog.records[0].message.startswith("explain: 8 equal blocks are compiled one by one")


def test_work_says_that_it_begins_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(_passes, "_EVERY", 0.001)
    with _passes.told("compiling", said.append):
        while len(said) < 2:
            time.sleep(0.001)
    assert said[0] == "explain: compiling ..."
    assert re.fullmatch(r"explain: compiling, \d+ s so far \.\.\.", said[1])
    assert re.fullmatch(r"explain: compiling took \d+\.\d s", said[-1])


def test_a_topology_of_another_size_is_refused_with_the_command_that_takes_it() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"4 devices and this process 8.*explain"):
        spmdzero.explain(make_model(), config(), make_batch(0, 0), tpu=["v5e:2x2"])
