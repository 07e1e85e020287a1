"""`"spmd": {"fused_loss": true}`: transformers' models train without logits, by torch's numbers."""

import copy
import re
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import spmdzero
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.nn import linear_cross_entropy
from spmdzero.nn._causal_lm import fuse_causal_lm_losses
from tests.support.bounds import assert_summed, summed
from tests.support.engines import start

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

VOCABULARY, LENGTH, ROWS = 384, 160, 16
SMALL = {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}


def gpt2(**more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_embd=32, n_head=2, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **SMALL, **more,
        )
    )  # fmt: skip


def llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=64, max_position_embeddings=LENGTH, **SMALL,
        )
    )  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[::2, 100:] = -100
    return {"input_ids": ids, "labels": labels}


def engine_of(model: nn.Module, *, fused: bool) -> spmdzero.Engine:
    return start(model, train_micro_batch_size_per_gpu=2, spmd={"fused_loss": fused})


def train(make: Any, *, fused: bool) -> tuple[list[float], set[tuple[int, ...]]]:
    """Four losses, and the shapes in the program of a step."""
    engine, inputs, texts = engine_of(make(), fused=fused), batch(), []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        losses = [engine.train_batch(inputs).item()]
    losses += [engine.train_batch(inputs).item() for _ in range(3)]
    found = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", texts[0])
    return losses, {tuple(map(int, dims.split(","))) for dims in found}


@pytest.mark.parametrize("make", [gpt2, pytest.param(llama, marks=pytest.mark.slow)])
def test_losses_are_those_without_and_no_program_has_the_logits(make: Any) -> None:
    (losses, shapes), (expected, others) = train(make, fused=True), train(make, fused=False)
    # fp32, summed in another order; AdamW's first updates are signs of gradients, so where one is
    # as small as its rounding the parameter moves by up to lr = 1e-3 the other way.
    assert losses == pytest.approx(expected, rel=2e-5)
    assert losses[0] - losses[-1] > 0.05
    rows = 2 * LENGTH
    whole = {(rows, VOCABULARY), (VOCABULARY, rows), (2, LENGTH, VOCABULARY)}
    assert others & whole
    assert not shapes & whole
    # Half of 320 rows, in tiles of 128: a chunk of 256, and one of 64.
    assert {(256, VOCABULARY), (64, VOCABULARY)} <= shapes


def test_outputs_while_training_and_in_evaluation() -> None:
    engine, inputs = engine_of(gpt2(), fused=True), batch()
    output = engine(**inputs)
    assert output.logits is None
    assert "logits" not in output
    loss = output.loss.item()
    engine.eval()
    with torch.no_grad():
        evaluated = engine(**inputs)
    assert evaluated.logits.shape == (ROWS, LENGTH, VOCABULARY)
    assert evaluated.loss.item() == summed(loss)


@pytest.fixture(scope="module")
def fused() -> transformers.PreTrainedModel:
    """On the CPU, as `initialize` changes a model before it places it."""
    model = gpt2()
    fuse_causal_lm_losses(model)
    return model


def test_the_number_of_items_divides_the_sum(fused: transformers.PreTrainedModel) -> None:
    plain, inputs = gpt2(), batch()
    for more in ({}, {"num_items_in_batch": 100}, {"num_items_in_batch": torch.tensor(100)}):
        expected = plain(**inputs, **more).loss
        assert_summed(fused(**inputs, **more).loss, expected)


def test_tuples_and_copies(fused: transformers.PreTrainedModel) -> None:
    inputs = batch()
    other = copy.deepcopy(fused)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    loss, *rest = other(**inputs, return_dict=False)
    # A copy computes with its own weight: all logits are zero.
    assert loss.item() == summed(torch.tensor(VOCABULARY).log().item())
    assert all(not isinstance(value, torch.Tensor) for value in rest)
    assert fused(**inputs).loss.item() != loss.item()
    assert list(fused.state_dict()) == list(gpt2().state_dict())


# peft asks transformers by a name that it takes for an old one.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_around_the_model(fused: transformers.PreTrainedModel) -> None:
    shape = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    wrapped = peft.get_peft_model(gpt2(), shape)
    fuse_causal_lm_losses(wrapped)
    inputs = batch()
    output = wrapped(**inputs)
    assert output.logits is None
    # Adapters start as zero.
    assert_summed(output.loss, fused(**inputs).loss)


def test_training_without_labels_says_that_it_computes_logits(
    fused: transformers.PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="spmdzero")
    assert fused(batch()["input_ids"]).logits.shape == (ROWS, LENGTH, VOCABULARY)
    assert "GPT2LMHeadModel trains without labels" in caplog.text


class Scaled(transformers.GPT2LMHeadModel):
    """As Granite and Cohere do."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.transformer(input_ids).last_hidden_state) / 8
        return {"loss": self.loss_function(logits, labels, vocab_size=VOCABULARY)}


def test_refused_models() -> None:
    with pytest.raises(SpmdZeroConfigError, match="Linear is no causal language model"):
        engine_of(nn.Linear(4, 4), fused=True)
    replaced = gpt2()
    replaced.lm_head = nn.Sequential(replaced.lm_head)
    with pytest.raises(SpmdZeroConfigError, match=r"is no plain nn[.]Linear without hooks"):
        fuse_causal_lm_losses(replaced)
    own = gpt2()
    own.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(SpmdZeroConfigError, match="its own loss"):
        fuse_causal_lm_losses(own)
    scaled = Scaled(gpt2().config)
    fuse_causal_lm_losses(scaled)
    with pytest.raises(SpmdZeroUsageError, match=r"uses its logits \(__truediv__\) on the way"):
        scaled(**batch())
    with pytest.raises(SpmdZeroConfigError, match=r"spmd.fused_loss.*global forward"):
        start(gpt2(), spmd={"fused_loss": True, "forward": "global"})


def test_a_label_out_of_range_is_nan_on_the_devices() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 8, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(x, self.head.weight, y)

    engine = start(Head())
    assert engine(torch.randn(8, 4), torch.full((8,), 7)).isfinite()
    assert engine(torch.randn(8, 4), torch.full((8,), 8)).isnan()
