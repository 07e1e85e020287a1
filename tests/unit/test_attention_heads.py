"""Which rows of a projection are heads to Muon, beside DeepSpeed's own functions."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim import LocalTensor, Muon, muon_groups

pytestmark = pytest.mark.backends("any")

PARAMS = {"per_head_muon": True}
LATENT = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
MODEL = {"num_attention_heads": 4, "hidden_size": 8}


class KimiDeltaAttention(nn.Module):
    """A layer whose heads aren't the config's: known by the name of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_k_dim, self.num_v_heads, self.head_dim = 2, 4, 8, 1
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))


class Unlisted(KimiDeltaAttention):
    """The same, by a name that nobody knows."""


def layers(**rows: int) -> nn.Module:
    """A block with a linear layer of each name, by the number of its rows."""
    attention = nn.ModuleDict({name: nn.Linear(8, number) for name, number in rows.items()})
    return nn.ModuleDict({"attention": attention})


# name -> config, model
CASES: dict[str, tuple[dict[str, Any] | None, nn.Module]] = {
    "plain": (MODEL, layers(q_proj=8, k_proj=8, v_proj=8, o_proj=8, up_proj=32)),
    "grouped": (MODEL | {"num_key_value_heads": 2}, layers(q_proj=8, k_proj=4, v_proj=4)),
    "one head for keys": (MODEL | {"num_kv_heads": 1}, layers(q_proj=8, k_proj=2, v_proj=2)),
    "width": (MODEL | {"head_dim": 5}, layers(q_proj=20, k_proj=20, v_proj=8)),
    "width is None": (MODEL | {"head_dim": None}, layers(wq=8, wk=8, wv=8, wo=8)),
    "width unknown": ({"num_attention_heads": 4}, layers(q_proj=8)),
    "width odd": (MODEL | {"hidden_size": 9}, layers(q_proj=8)),
    "Bert": (MODEL, layers(query=8, key=8, value=8, dense=8)),
    "begins so": (MODEL, layers(QUERY_1=8, key_1=8, value_head=1, dense=8)),
    "n_head": ({"n_head": 4, "hidden_size": 8}, layers(q_proj=8, k_proj=8)),
    "text": ({"text_config": SimpleNamespace(**MODEL), "num_heads": 3}, layers(q_proj=8)),
    "fused": (MODEL, layers(qkv_proj=24, c_attn=24, query_key_value=24, Wqkv=24)),
    "latent": (MODEL | LATENT, layers(q_a_proj=8, q_b_proj=24, kv_a_proj=8, kv_b_proj=28)),
    "latent, low rank": (MODEL | LATENT, layers(q_proj=24, kv_a_proj_with_mqa=6, kv_b_proj=20)),
    "latent, plain too": (MODEL | LATENT | {"head_dim": 6}, layers(q_proj=24, k_proj=24)),
    "no heads in it": (MODEL, layers(fc1=8, dense=8)),
    "heads of an embedding": (MODEL, nn.ModuleDict({"embed": layers(q_proj=8)})),
    "at the top": (MODEL, nn.ModuleDict({"q_proj": nn.Linear(8, 8)})),
    "convolution": (MODEL, nn.ModuleDict({"query": nn.Conv2d(1, 8, 2), "key": nn.Linear(8, 8)})),
    "no config": (None, layers(q_proj=8)),
    "config without heads": ({"hidden_size": 8}, layers(q_proj=8)),
    "linear attention": (MODEL, nn.ModuleDict({"a": KimiDeltaAttention(), "b": layers(q_proj=8)})),
    "linear attention, unlisted": (MODEL, nn.ModuleDict({"a": Unlisted()})),
}


def made(name: str) -> nn.Module:
    config, model = CASES[name]
    if config is not None:
        model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return model


def ours(model: nn.Module) -> dict[str, int] | None:
    """Name of a parameter -> heads; None where it is refused."""
    try:
        rule, _ = next(muon_groups([{"params": list(model.parameters())}], model, PARAMS))
    except SpmdZeroConfigError:
        return None
    assert isinstance(rule, Muon)
    return dict(rule.heads)


def theirs(model: nn.Module) -> dict[str, int] | None:
    deepspeed = pytest.importorskip("deepspeed")
    config = SimpleNamespace(optimizer_name="muon", optimizer_params=PARAMS)
    try:
        deepspeed.set_optimizer_flags(config, model)
    except ValueError:
        return None
    heads = {name: p.muon_num_heads for name, p in model.named_parameters()}
    return {name: number for name, number in heads.items() if number is not None}


@pytest.mark.parametrize("name", CASES)
def test_the_heads_of_a_model_are_deepspeeds(name: str) -> None:
    assert ours(made(name)) == theirs(made(name))


def test_the_heads_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        ours(made("grouped"))
    assert "k_proj: 2 of 2 rows; q_proj: 4 of 2 rows; v_proj: 2 of 2 rows" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no config", "its config has no number of attention heads"),
        ("fused", "no layer has the name of a projection of its own"),
        ("width odd", "q_proj: its 8 rows aren't heads, the config has no width"),
    ],
)
def test_a_model_without_known_heads_is_refused(name: str, words: str) -> None:
    model = made(name)
    with pytest.raises(SpmdZeroConfigError, match="Write false") as caught:
        next(muon_groups([{"params": list(model.parameters())}], model, PARAMS))
    assert caught.value.key == "optimizer.params.per_head_muon"
    assert words in caught.value.reason


def test_a_layer_that_the_config_does_not_explain_is_whole_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert ours(made("width")) == {"attention.q_proj.weight": 4, "attention.k_proj.weight": 4}
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "v_proj: its 8 rows aren't 4 heads of 5" in record.getMessage()


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize(("heads", "rows"), [(4, 24), (1, 6), (2, 48), (None, 24)])
def test_steps_by_heads_are_deepspeeds(
    monkeypatch: pytest.MonkeyPatch, method: Any, heads: int | None, rows: int
) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
    # DeepSpeed's choice where a processor has no 16-bit formats: one side alone rounds to bf16.
    monkeypatch.setattr(theirs, "ns_compute_dtype", lambda method: torch.float32)
    rule = Muon(ns_method=method, heads={} if heads is None else {"q": heads})
    hyper = {k: torch.tensor(v) for k, v in rule.hyper(rule.defaults).items()}
    whole = LocalTensor(shape=(rows, 10), name="q")
    buffer, momentum = torch.zeros(rows, 10), torch.zeros(rows, 10)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        grad = torch.randn(rows, 10, generator=generator)
        found, state = rule.direction(grad, {"momentum_buffer": buffer}, hyper, whole)
        buffer = state["momentum_buffer"]
        with torch.compiler.set_stance("force_eager"):
            expected = theirs.muon_update(
                grad.clone(), momentum, beta=0.95, ns_method=method, num_heads=heads
            )
        torch.testing.assert_close(buffer, momentum)
        # The polynomial's slope at 0, 3.4445 ** 5, carries a rounding furthest. 15 products in a
        # row, each rounded to bf16's 3 digits, were up to 0.06 away in 160 draws of these shapes;
        # a matrix of all heads is 0.2 and more away from that of each.
        atol = 1e-3 if method == "gram" else 0.1
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
