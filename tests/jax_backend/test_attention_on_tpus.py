"""Programs for TPUs: attention is a kernel there, and the CPU's own program stays plain."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero import Explanation
from spmdzero.backend import Mesh
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.explain import Topology, _aot

LENGTH, WIDTH, HEADS = 256, 128, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


class Model(nn.Module):
    """One attention; reads a value of its weights if it is told to."""

    def __init__(self, *, reads: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(1024, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head, self.reads, self.dropout = nn.Linear(WIDTH, 1024), reads, dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.embed(tokens))
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        logits = self.head(out.transpose(1, 2).flatten(2)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return -loss if self.reads and self.qkv.weight.sum().isnan().item() else loss


def tokens() -> torch.Tensor:
    return torch.randint(1024, (8, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Target -> the text of the latest program that was compiled for it."""
    found: dict[str, str] = {}
    read = _aot._read

    def kept(folder: Path, topology: Topology, **more: Any) -> Any:
        made = read(folder, topology, **more)
        found[topology.name] = made.hlo or ""
        return made

    monkeypatch.setattr(_aot, "_read", kept)
    return found


def kernels(text: str) -> list[str]:
    """``forward`` or ``backward``, of each kernel in the text."""
    # An instruction may go over several lines.
    calls = re.split(r"\n  (?=%|ROOT )", text)
    calls = [call for call in calls if 'custom_call_target="tpu_custom_call"' in call]
    return [re.findall(r"attention\.(forward|backward)", call)[0] for call in calls]


def assert_is_a_kernel(text: str) -> None:
    assert kernels(text) == ["forward", "backward"]
    # Neither scores nor weights of all pairs.
    assert f"{LENGTH},{LENGTH}]" not in text


def traffic(explanation: Explanation, target: str) -> tuple[int, int]:
    moves = explanation.moves_on(target)
    return len(moves.activations), len(moves.unnamed)


@pytest.mark.slow
def test_the_tpus_program_has_kernels_and_moves_and_donates_what_it_did(
    mesh: Mesh, texts: dict[str, str]
) -> None:
    explanation = spmdzero.explain(Model(), CONFIG, tokens(), tpu=["v5e:2x4"], stages=())
    assert_is_a_kernel(texts["v5e:2x4"])
    assert traffic(explanation, "v5e:2x4") == (0, 0)
    assert explanation.moves_on("v5e:2x4").over_floor <= 1.02
    # All but the loss and the norm take an input's place.
    outputs = re.search(r"->\((.*)\)}", texts["v5e:2x4"].splitlines()[0])
    assert outputs is not None
    donated = re.search(r"input_output_alias={(.*?) }", texts["v5e:2x4"].splitlines()[0])
    assert donated is not None
    made, reused = len(re.findall(r"\[", outputs[1])), donated[1].count("alias)")
    assert made - reused <= 2
    (use,) = explanation.attention
    assert (use.calls, use.plain_because, explanation.tpu_note) == (1, None, "")
    assert "attention on a TPU: 1 call by a kernel, first at " in str(explanation)
    assert explanation.audit.steps == 3


@pytest.mark.slow
def test_an_engine_is_explained_for_a_tpu_and_trains_on_unharmed(
    mesh: Mesh, texts: dict[str, str]
) -> None:
    def engine() -> Any:
        torch.manual_seed(3)
        model = Model(dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        made, *_ = spmdzero.initialize(
            model=model, optimizer=optimizer,
            config={key: value for key, value in CONFIG.items() if key != "optimizer"},
        )  # fmt: skip
        return made

    def losses(engine: Any, steps: int) -> list[float]:
        return [engine.train_batch(iter([tokens()])).item() for _ in range(steps)]

    undisturbed = losses(engine(), 8)
    explained = engine()
    before = losses(explained, 3)
    # It trains one step itself.
    explanation = explained.explain(tokens(), tpu=["v5e:2x4"])
    assert [*before, *losses(explained, 4)] == [*undisturbed[:3], *undisturbed[4:]]
    (use,) = explanation.attention
    assert "dropout_p > 0" in (use.plain_because or "")
    assert kernels(texts["v5e:2x4"]) == []
    assert "as plain products, first at" in str(explanation)


@pytest.mark.slow
def test_a_model_that_reads_its_weights_is_explained_by_the_cpus_program(
    mesh: Mesh, texts: dict[str, str]
) -> None:
    model = Model(reads=True)
    explanation = spmdzero.explain(model, CONFIG, tokens(), tpu=["v5e:2x4"], stages=())
    assert "Python reads a value here" in explanation.tpu_note
    assert explanation.tpu_note in str(explanation)
    assert kernels(texts["v5e:2x4"]) == []
    assert traffic(explanation, "v5e:2x4") == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_transformers_models_reach_the_kernels(
    mesh: Mesh, texts: dict[str, str], name: str, masked: bool
) -> None:
    import transformers

    if name == "GPT2":
        config: Any = transformers.GPT2Config(
            n_embd=64, n_head=2, n_layer=1, n_positions=LENGTH, vocab_size=128, attn_pdrop=0.0,
            attn_implementation="sdpa",
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
            num_hidden_layers=1, vocab_size=128, attn_implementation="sdpa",
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    batch = {"input_ids": tokens(), "labels": tokens()}
    if masked:
        batch["attention_mask"] = (torch.arange(LENGTH) < 200).long().expand(8, LENGTH)
    explanation = spmdzero.explain(model, CONFIG, batch, tpu=["v5e:2x4"], stages=())
    assert [use.plain_because for use in explanation.attention] == [None]
    found = kernels(texts["v5e:2x4"])
    # A mask's backward is two kernels: the query's, and that of key and value.
    assert found == ["forward", "backward", "backward"] if masked else ["forward", "backward"]
    assert traffic(explanation, "v5e:2x4") == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
def test_windows_caps_and_sinks_of_transformers_models_are_kernels(
    mesh: Mesh, texts: dict[str, str], name: str, masked: bool
) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=128, intermediate_size=192, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, num_hidden_layers=1, vocab_size=128, sliding_window=128, use_cache=False,
        layer_types=["sliding_attention"], attention_dropout=0.0, num_local_experts=2,
        num_experts_per_tok=1, pad_token_id=0, max_position_embeddings=512,
        **({"rope_scaling": None} if name == "GptOss" else {}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    if name == "GptOss":
        model.set_experts_implementation("batched_mm")
    batch = {"input_ids": tokens() % 128, "labels": tokens() % 128}
    if masked:
        batch["attention_mask"] = (torch.arange(LENGTH) < 200).long().expand(8, LENGTH)
    explanation = spmdzero.explain(model, CONFIG, batch, tpu=["v5e:2x4"], stages=())
    assert [use.plain_because for use in explanation.attention] == [None]
    text = texts["v5e:2x4"]
    found = kernels(text)
    assert found == ["forward", "backward", "backward"] if masked else ["forward", "backward"]
    assert ".causal.window128" in text
    # Neither scores nor weights nor a mask of all pairs.
    assert f"{LENGTH},{LENGTH}]" not in text
    assert traffic(explanation, "v5e:2x4") == (0, 0)


def test_a_failure_in_a_kernel_is_said_before_the_kernel(tmp_path: Path) -> None:
    kernel = "\n".join(f"  operation {number}" for number in range(500))
    said = f"Traceback:\n  line 1\njaxlib.XlaRuntimeError: INTERNAL: expected <= 7\n{kernel}"
    (tmp_path / "status").write_text(json.dumps({"status": 1, "said": said}))
    with pytest.raises(SpmdZeroRuntimeError, match=r"for v5e:2x4.*\n.*expected <= 7") as failure:
        _aot._read(tmp_path, Topology.parse("v5e:2x4"))
    assert len(str(failure.value).splitlines()) < 10
