"""What of equal blocks a search may keep for their backward."""

import pytest
import torch
import transformers
from torch import nn

from spmdzero.backend.replica._keep_sets import block_layers, keep_sets

pytestmark = pytest.mark.backends("jax")


class Mixture(nn.Module):
    """A block with experts, which are equal modules too."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 16)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(16, 32), nn.Linear(32, 16)


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in block_layers(model)]


def test_a_layers_name_is_its_alone_in_each_block() -> None:
    model = nn.ModuleList(Mixture(2) for _ in range(3))
    assert names(model) == [
        "q", "out", "experts.0.w1", "experts.0.w2", "experts.1.w1", "experts.1.w2",
    ]  # fmt: skip
    # Of many experts each sees some of the tokens.
    assert names(nn.ModuleList(Mixture(8) for _ in range(3))) == []


def test_names_are_those_that_all_kinds_of_blocks_have() -> None:
    told = transformers.BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        found = names(transformers.BartForConditionalGeneration(told))
    assert found == [*(f"self_attn.{p}_proj" for p in ("k", "v", "q", "out")), "fc1", "fc2"]


def test_what_is_never_called_is_no_layer() -> None:
    # Its attention reads the weight of `out_proj`.
    block = nn.TransformerEncoderLayer(16, 2, 32)
    assert names(nn.TransformerEncoder(block, 3, enable_nested_tensor=False)) == [
        "linear1", "linear2",
    ]  # fmt: skip


def test_sets_grow_by_what_saves_most_for_a_byte() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide, self.last = nn.Linear(8, 4), nn.Linear(64, 2), nn.Linear(99, 9)

    model = nn.ModuleList(Block() for _ in range(2))
    sets = [(s.names, s.features) for s in keep_sets(model, attends=True)]
    assert sets == [
        (("context",), 8), (("context", "wide"), 10), (("context", "wide", "narrow"), 14),
    ]  # fmt: skip
    assert [s.names for s in keep_sets(model, attends=False, least=16)] == [("wide",)]


def test_blocks_without_linear_layers_may_keep_attention() -> None:
    told = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32)
    model = transformers.GPT2LMHeadModel(told)
    assert [s.names for s in keep_sets(model, attends=True)] == [("context",)]
    assert keep_sets(model, attends=False) == []
    assert keep_sets(nn.Linear(2, 2), attends=False) == []
