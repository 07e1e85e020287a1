"""`"spmd": {"recompute": "fit"}`: the cheapest policy with which a step fits a budget of bytes."""

import functools
import importlib.util
import json
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import runtime
from spmdzero.backend.jax.device_memory import peak_of
from spmdzero.backend.jax.graph._options import of_devices
from spmdzero.backend.jax.lowering import lowered
from spmdzero.engine import StepGraph
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from tests.engine.test_recompute import ROWS, WIDTH, Stack
from tests.support.engines import config, start, three_calls
from tests.support.selected import outside

POLICIES = ("nothing", "dots", "everything")


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"
)


def jaxs_peak(graph: StepGraph) -> int:
    """What XLA says that a step's program needs of a device, its inputs included."""
    program = lowered(list(graph.outputs.values())).compile(compiler_options=of_devices())
    return peak_of(program.memory_analysis())


def train(recompute: Any, *, calls: bool = False) -> tuple[list[float], list[int]]:
    """Two losses, and the peak of each program of the first step."""
    torch.manual_seed(0)
    engine = start(Stack(), train_micro_batch_size_per_gpu=ROWS, spmd={"recompute": recompute})
    batch = torch.randn(8 * ROWS, WIDTH)
    torch.manual_seed(5)
    peaks: list[int] = []
    step = functools.partial(three_calls, engine) if calls else engine.train_batch
    with engine.observe(lambda graph: peaks.append(jaxs_peak(graph))):
        losses = [step(batch).item()]
    return [*losses, step(batch).item()], peaks


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[list[float], list[int]]]:
    return {policy: train(policy) for policy in POLICIES}


@pytest.mark.parametrize(
    "picked", [pytest.param(policy, marks=outside(["dots"], policy)) for policy in POLICIES]
)
def test_the_first_that_fits_is_taken(
    trained: Any, picked: str, caplog: pytest.LogCaptureFixture
) -> None:
    losses, peaks = trained[picked]
    # Not the byte more with which the policy before it would fit.
    with caplog.at_level("INFO", logger="spmdzero"):
        ours, theirs = train({"fit": max(peaks)}, calls=picked == "dots")
    assert max(theirs) <= max(peaks)
    assert ours == losses
    (line,) = [r.getMessage() for r in caplog.records if "recompute" in r.getMessage()]
    assert f'"{picked}"' in line
    assert f"{max(peaks):,} bytes" in line


def test_without_room_for_any_the_error_has_the_bytes_of_each(trained: Any) -> None:
    with pytest.raises(SpmdZeroConfigError) as raised:
        train({"fit": "100KB"})
    said = str(raised.value)
    for policy in POLICIES:
        assert f'"{policy}" {max(trained[policy][1]):,}' in said
    assert "100,000 bytes" in said
    for nearest in ('"stage": 3', '"offload_optimizer"', "rows"):
        assert nearest in said


@pytest.mark.parametrize(
    ("budget", "words"),
    [("12 apples", "bytes"), (0, "bytes"), ({"fit": "1GB", "blocks.*": "dots"}, "alone")],
)
def test_budgets_that_are_none(budget: Any, words: str) -> None:
    recompute = budget if isinstance(budget, dict) else {"fit": budget}
    with pytest.raises(SpmdZeroConfigError, match=words):
        start(Stack(), spmd={"recompute": recompute})


def test_a_cpu_needs_a_budget() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r'CPU.*\{"fit": "12GB"\}'):
        start(Stack(), spmd={"recompute": "fit"})


class Outside(nn.Module):
    """Blocks that leave the loss to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack().blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_loss_of_the_loops_own_is_refused_in_words() -> None:
    engine = start(Outside(), spmd={"recompute": {"fit": "1GB"}})
    with pytest.raises(SpmdZeroUsageError, match=r"recompute.*returns its loss"):
        engine(torch.randn(8, WIDTH))


def test_nothing_is_picked_for_an_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Stack(), spmd={"recompute": {"fit": "1GB"}})
    with caplog.at_level("INFO", logger="spmdzero"), torch.no_grad():
        engine(torch.randn(8, WIDTH))
    assert "recompute" not in caplog.text


def test_random_numbers_and_weights_are_not_touched_by_the_search() -> None:
    states = []
    for recompute in ("nothing", {"fit": "1GB"}):
        torch.manual_seed(0)
        engine = start(Stack(), spmd={"recompute": recompute})
        engine(torch.randn(8, WIDTH))
        states.append((torch.get_rng_state(), runtime.generator_state()))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


@pytest.mark.slow
def test_explain_takes_the_budget_of_this_machines_devices(trained: Any) -> None:
    budget = max(trained["everything"][1])
    told = config(train_micro_batch_size_per_gpu=ROWS, spmd={"recompute": {"fit": budget}})
    found = spmdzero.explain(Stack(), told, torch.randn(8 * ROWS, WIDTH), stages=())
    (note,) = [note for note in found.notes if "recompute" in note]
    assert '"everything"' in note
    assert found.config["spmd"]["recompute"] == "everything"


@pytest.mark.slow
@needs_libtpu
def test_explain_picks_by_the_tpus_compiler() -> None:
    def explained(recompute: Any) -> spmdzero.Explanation:
        told = config(train_micro_batch_size_per_gpu=ROWS, spmd={"recompute": recompute})
        with torch.device("meta"):
            model = Stack()
        batch = torch.empty(8 * ROWS, WIDTH, device="meta")
        return spmdzero.explain(model, told, batch, tpu=["v5e:2x4"], stages=())

    found = {policy: explained(policy) for policy in POLICIES}
    peaks = {policy: each.verdicts[0].peak for policy, each in found.items()}
    assert peaks["everything"] < peaks["nothing"]
    fit = explained("fit")
    assert fit.config["spmd"]["recompute"] == "nothing"
    assert fit.verdicts[0].peak == peaks["nothing"]
    # Of those that fit a budget between two peaks the one with the fewest cycles.
    budget = peaks["nothing"] - 1
    fit = explained({"fit": budget})
    kept = explained({"keep": ["up"]})
    ways = [("everything", found["everything"]), ("dots", found["dots"]), ({"keep": ["up"]}, kept)]
    policy, quickest = min(
        (way for way in ways if way[1].verdicts[0].peak <= budget),
        key=lambda way: way[1].times[0].seconds,
    )
    assert fit.config["spmd"]["recompute"] == policy
    assert fit.verdicts[0].peak == quickest.verdicts[0].peak <= budget
    (note,) = [note for note in fit.notes if "recompute" in note]
    assert f"{budget:,} bytes" in note
    assert f"{peaks['nothing']:,}" in note


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    told = LlamaConfig(
        num_hidden_layers=4, hidden_size=64, intermediate_size=128, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(told)


def test_what_saves_most_is_kept_where_not_all_fits(caplog: pytest.LogCaptureFixture) -> None:
    rows = torch.randint(64, (64, 64), generator=torch.Generator().manual_seed(0))

    def peak(recompute: Any) -> tuple[int, float]:
        engine = start(llama(), train_micro_batch_size_per_gpu=8, spmd={"recompute": recompute})
        peaks: list[int] = []
        with engine.observe(lambda graph: peaks.append(jaxs_peak(graph))):
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            engine.step()
        return max(peaks), loss.item()

    names = ["context", "q_proj", "k_proj", "v_proj", "o_proj"]
    budget, _ = peak({"keep": names})
    assert budget < peak({"keep": [*names, "gate_proj"]})[0]
    with caplog.at_level("INFO", logger="spmdzero"):
        taken, loss = peak({"fit": budget})
    assert taken <= budget
    assert loss == pytest.approx(peak("nothing")[1], rel=1e-6)
    (line,) = [r.getMessage() for r in caplog.records if '"fit" is read' in r.getMessage()]
    assert f'is read as {{"keep": {json.dumps(names)}}}:' in line
