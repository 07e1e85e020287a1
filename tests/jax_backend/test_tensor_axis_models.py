"""Models of transformers on meshes with the axis tensor: losses and gradients of one axis.

As a program it trains one on the devices that there are.
"""

import json
import math
import sys
from typing import Any

import pytest
import torch

from tests.jax_backend.test_tensor_axis import (
    CLOSE,
    WIDTH,
    WORDS,
    assert_same_gradients,
    batch,
    gradients,
    llama,
    started,
)
from tests.support.processes import run_python

STEPS = 20
# With DeepSpeed's eps of 1e-8, Adam makes steps of another size of gradients that are rounding
# errors, and losses differ by 1.03e-6 after four steps.
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5}}


def models() -> dict[str, tuple[Any, dict[str, str]]]:
    """Name -> what makes the model, and the partition where its own plan is not taken."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2}
    inner = {"intermediate_size": 2 * WIDTH, "num_attention_heads": 8}
    return {
        "llama": (llama, {}),
        # Its q, k and v are one weight, of which a device has a slice.
        "gpt2": (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=WORDS, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=8,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                )
            ),
            {
                "*.attn.c_attn.*": "column", "*.attn.c_proj.weight": "row",
                "*.mlp.c_fc.*": "column", "*.mlp.c_proj.weight": "row", "*wte.weight": "row",
            },
        ),
        "bert": (
            lambda: transformers.BertForMaskedLM(
                transformers.BertConfig(
                    **sizes, **inner, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
                )
            ),
            {
                "*.attention.self.*": "column", "*.attention.output.dense.weight": "row",
                "*.intermediate.dense.*": "column", "*.output.dense.weight": "row",
            },
        ),
        "mixtral": (
            lambda: transformers.MixtralForCausalLM(
                transformers.MixtralConfig(
                    **sizes, **inner, num_key_value_heads=4, num_local_experts=4, use_cache=False
                )
            ),
            {},
        ),
        # Its plan has weights whose results are gathered, and rows that take whole inputs.
        "phi3": (
            lambda: transformers.Phi3ForCausalLM(
                transformers.Phi3Config(
                    **sizes, **inner, num_key_value_heads=4, pad_token_id=0, use_cache=False
                )
            ),
            {},
        ),
    }  # fmt: skip


def assert_is_as_on_one_axis(kind: str, mesh: dict[str, int], stage: int) -> None:
    """Trains on `mesh` and on as many devices along ``fsdp``, and compares."""
    make, partition = models()[kind]
    losses, first = [], []
    for axes, split in (({"fsdp": math.prod(mesh.values())}, {}), (mesh, {"partition": partition})):
        torch.manual_seed(0)
        engine = started(axes, stage=stage, spmd=split, model=make(), optimizer=ADAM)
        losses.append([])
        for step in range(STEPS):
            loss = engine(**batch(step)).loss
            engine.backward(loss)
            if step == 0:
                first.append(gradients(engine))
            engine.step()
            losses[-1].append(loss.item())
    for found in first:
        for name in [name for name in found if name.endswith("self.key.bias")]:
            # It adds the same to all scores of a query: but for rounding its gradient is zero.
            assert found.pop(name).abs().max().item() < 1e-9
    assert_same_gradients(first[1], first[0])
    torch.testing.assert_close(losses[1], losses[0], **CLOSE)


ROWS_OF_THE_PRODUCT = [
    (kind, mesh, stage)
    for kind in ("llama", "gpt2", "bert", "mixtral")
    for mesh, stage in (
        ({"fsdp": 2, "tensor": 2}, 3), ({"fsdp": 4, "tensor": 2}, 2), ({"fsdp": 2, "tensor": 4}, 3),
    )
] + [("phi3", {"fsdp": 4, "tensor": 2}, 2)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh", "stage"), ROWS_OF_THE_PRODUCT, ids=str)
def test_losses_and_gradients_by_name(kind: str, mesh: dict[str, int], stage: int) -> None:
    devices = math.prod(mesh.values())
    if devices == 8:
        assert_is_as_on_one_axis(kind, mesh, stage)
        return
    told = kind, json.dumps(mesh), str(stage)
    run_python("-m", "tests.jax_backend.test_tensor_axis_models", *told, devices=devices)


if __name__ == "__main__":
    assert_is_as_on_one_axis(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
