"""Windows, soft caps and sinks of transformers' models, by kernels, beside its own attention."""

import copy
from typing import Any

import pytest
import torch
import transformers

import spmdzero
from spmdzero.backend import Mesh, Work
from spmdzero.backend.attention import _call
from spmdzero.backend.attention._form import Form
from spmdzero.engine import counting_work

ROWS, LENGTH, WINDOW = 8, 160, 24
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "attention_dropout": 0.0, "pad_token_id": 0,
    "use_cache": False, "sliding_window": WINDOW,
}  # fmt: skip
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma2": {**BOTH, "attn_logit_softcapping": 0.4, "query_pre_attn_scalar": 16},
    "GptOss": {
        **BOTH, "rope_scaling": None, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
    "Gemma3Text": BOTH,
    "Qwen2": {**BOTH, "use_sliding_window": True},
}  # fmt: skip
# What a kernel computes of a layer: causal, window, cap and sinks.
KERNELS: dict[str, list[tuple[int | None, float | None, bool]]] = {
    "Mistral": [(WINDOW, None, False)] * 2,
    "Gemma2": [(WINDOW, 0.4, False), (None, 0.4, False)],
    "GptOss": [(WINDOW, None, True), (None, None, True)],
    "Gemma3Text": [(WINDOW, None, False), (None, None, False)],
    "Qwen2": [(WINDOW, None, False), (None, None, False)],
}


def tiny(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if family == "GptOss":
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of products as large as the cap, and sinks that take a part.
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.normal_(std=0.5)
            if name.endswith("sinks"):
                parameter.normal_()
    return model


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[Form]:
    """The forms of the kernels that ran forward."""
    found: list[Form] = []
    attend = _call.attend

    def noted(kernels: Any, form: Form, tensors: Any) -> Any:
        found.append(form)
        return attend(kernels, form, tensors)

    monkeypatch.setattr(_call, "attend", noted)
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "family",
    [
        "Gemma2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Mistral", "GptOss", "Gemma3Text", "Qwen2")
        ),
    ],
)
def test_models_train_by_kernels_as_by_their_own_attention(
    mesh: Mesh, forms: list[Form], family: str, padded: bool
) -> None:
    model, batch = tiny(family), texts(padded=padded)
    plain = copy.deepcopy(model)
    engine, loss = trained(model, batch)
    assert [call.plain_because for call in engine.attention] == [None, None]
    assert [(form.window, form.soft_cap, form.sinks) for form in forms[:2]] == KERNELS[family]
    assert all(form.causal for form in forms)
    assert all(form.mask_shape == ((1, 1, 1, 256) if padded else ()) for form in forms)
    assert_as_by_itself(plain, batch, model, loss)


@pytest.mark.parametrize("way", ["torch", "reentrant", "config"])
def test_what_is_computed_again_reads_its_mask_as_the_first_run_did(
    mesh: Mesh, forms: list[Form], way: str
) -> None:
    model, batch, spmd = tiny("Mistral"), texts(padded=True), {}
    plain = copy.deepcopy(model)
    if way == "config":
        spmd["recompute"] = "everything"
    else:
        # Newer releases have another name for it.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": way == "reentrant"})
    engine, loss = trained(model, batch, **spmd)
    assert [call.plain_because for call in engine.attention] == [None, None]
    assert len(forms) >= 4, "each of two blocks runs twice"
    assert {form.mask_shape for form in forms} == {(1, 1, 1, 256)}
    assert_as_by_itself(plain, batch, model, loss)


@pytest.mark.parametrize("attention", ["kernel", "plain"])
@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Gemma3Text"])
def test_a_models_arithmetic_has_the_pairs_that_its_mask_shows(
    mesh: Mesh, family: str, attention: str
) -> None:
    model = tiny(family)
    layers, own = KERNELS[family], dict(model.named_parameters())
    weights = sum(w.numel() for w in own.values() if w.dim() == 2)
    weights -= 0 if model.lm_head.weight is own["model.embed_tokens.weight"] else 64 * 32
    pairs = sum(
        LENGTH**2 / 2 if window is None else window * (LENGTH - window / 2)
        for window, _, _ in layers
    )
    with counting_work() as count:
        engine, _ = trained(model, texts(padded=True), attention=attention)
    assert engine.plan.mesh.size == ROWS
    assert count.take() == Work(flops=3 * (2 * LENGTH * weights + 4 * 4 * 16 * pairs))


def texts(*, padded: bool) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (ROWS, LENGTH), generator=drawn)
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (ROWS, 1), generator=drawn)
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}


def trained(
    model: Any, batch: dict[str, torch.Tensor], **spmd: Any
) -> tuple[spmdzero.Engine, torch.Tensor]:
    """The engine and the loss of one step at a rate of 0.1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "spmd": {"attention": "kernel", **spmd},
    }
    engine, *_ = spmdzero.initialize(model=model, config=config)
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return engine, loss


def assert_as_by_itself(
    plain: Any, batch: dict[str, torch.Tensor], model: Any, loss: torch.Tensor
) -> None:
    """Checks the loss and the step of `model` beside `plain`, the model before it, by rows."""
    rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(ROWS)]
    right = torch.stack([plain(**row).loss for row in rows]).mean()
    right.backward()
    # fp32: sums in another order.
    assert loss.item() == pytest.approx(right.item(), rel=1e-5)
    trained = {name: tensor.cpu() for name, tensor in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        step = (parameter.detach() - trained[name]) / 0.1
        # The step is read off weights of up to 2, each rounded to 24 bits.
        bound = 1e-4 * parameter.grad.abs().max().item() + 2**-22 * 10
        torch.testing.assert_close(step, parameter.grad, rtol=0, atol=bound, msg=name)
