"""Hugging Face models run in the replica region as they are, with torch's numbers."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from region_harness import ROWS, Probe, assert_same_sums, torch_gradients

import spmdzero
from spmdzero.backend import Mesh
from spmdzero.errors import ReplicaRegionError

pytestmark = pytest.mark.backends("jax", "torch_xla")

VOCABULARY, LENGTH = 64, 12
SMALL = {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}


def gpt2() -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_embd=32, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **SMALL,
        )
    )  # fmt: skip


def bert() -> transformers.PreTrainedModel:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=16, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, **SMALL,
        )
    )  # fmt: skip


def inputs() -> dict[str, torch.Tensor]:
    """Token ids with padding at the right of half of the rows, alike on every replica."""
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[::2, 9:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def place(probe: Probe) -> dict[str, Any]:
    return {name: probe.batch(tensor) for name, tensor in inputs().items()}


@dataclasses.dataclass(frozen=True)
class Trained:
    """One forward and backward, in the region and in torch."""

    output: Any
    expected: Any
    gradients: dict[str, torch.Tensor]
    expected_gradients: dict[str, torch.Tensor]
    sink_calls: list[str]


@pytest.fixture(scope="module", params=[gpt2, bert])
def trained(mesh: Mesh, request: pytest.FixtureRequest) -> Trained:
    torch.manual_seed(0)
    module = request.param()
    probe = Probe(module, mesh)
    output, expected = probe(**place(probe)), module(**inputs())
    probe.backward(output.loss)
    gradients = torch_gradients(module, expected.loss)
    return Trained(output, expected, probe.gradients, gradients, probe.sink_calls)


def test_the_output_is_the_same_model_output_with_torchs_values(trained: Trained) -> None:
    assert type(trained.output) is type(trained.expected)
    assert trained.output.keys() == trained.expected.keys()
    assert_same_sums(trained.output.loss.detach(), trained.expected.loss.detach())
    assert_same_sums(trained.output.logits.detach(), trained.expected.logits.detach())


def test_gradients_equal_torch(trained: Trained) -> None:
    assert_same_sums(trained.gradients, trained.expected_gradients)


def test_every_parameter_reports_one_gradient_tied_ones_too(trained: Trained) -> None:
    assert sorted(trained.sink_calls) == sorted(trained.expected_gradients)


def test_the_key_value_cache_leaves_with_all_rows(trained: Trained) -> None:
    if "past_key_values" not in trained.expected:  # BERT has none
        assert "past_key_values" not in trained.output
        return
    cache, own = trained.output.past_key_values, trained.expected.past_key_values
    for layer, own_layer in zip(cache.layers, own.layers, strict=True):
        assert_same_sums(layer.keys.detach(), own_layer.keys.detach())
        assert_same_sums(layer.values.detach(), own_layer.values.detach())


def test_gradients_under_transformers_own_checkpointing_equal_torch(mesh: Mesh) -> None:
    torch.manual_seed(0)
    module = gpt2()
    probe = Probe(module, mesh)
    probe.module.activation_checkpointing_enable()
    loss = probe(**place(probe), use_cache=False).loss
    probe.backward(loss)
    expected = torch_gradients(module, module(**inputs()).loss)
    assert_same_sums(probe.gradients, expected)


@pytest.mark.parametrize("name", ["labels", "logits_to_keep"])
def test_a_shape_of_the_datas_names_transformers_own_way_round(mesh: Mesh, name: str) -> None:
    if name == "labels":
        module: transformers.PreTrainedModel = transformers.DebertaV2ForSequenceClassification(
            transformers.DebertaV2Config(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                max_position_embeddings=16, vocab_size=VOCABULARY,
            )
        )  # fmt: skip
        # Some rows have no label, and so not all replicas as many.
        value = torch.zeros(ROWS, dtype=torch.int64)
        value[0] = -100
        remedy = 'problem_type = "single_label_cl'
    else:
        module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                use_cache=False, **SMALL,
            )
        )  # fmt: skip
        value, remedy = inputs()["input_ids"] > 30, "give logits_to_keep integers"
    probe = Probe(module, mesh)
    ids = probe.batch(inputs()["input_ids"])
    with pytest.raises(ReplicaRegionError, match=remedy):
        probe(input_ids=ids, **{name: probe.batch(value)})


@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_rows_that_only_some_devices_pad_train_in_a_plain_loop(
    mesh: Mesh, make: Callable[[], transformers.PreTrainedModel]
) -> None:
    torch.manual_seed(0)
    model = make()
    plain, batch = copy.deepcopy(model), {k: v[: mesh.size] for k, v in inputs().items()}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    engine, *_ = spmdzero.initialize(model=model, config=config)
    loss = engine(**batch).loss
    engine.backward(loss)
    rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(mesh.size)]
    right = torch.stack([plain(**row).loss for row in rows]).mean()
    right.backward()
    # fp32: sums in another order.
    torch.testing.assert_close(loss.item(), right.item(), rtol=1e-6, atol=0)
    # A key's bias has no gradient but what rounding leaves.
    bound = 1e-7 * max(float(p.grad.abs().max()) for p in plain.parameters())
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-5, atol=bound, msg=name)
