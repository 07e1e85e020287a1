"""Mixtures of experts of transformers, tiny and of random weights, beside torch on the CPU."""

import copy
from typing import Any

import pytest
import torch
import transformers

import spmdzero
from spmdzero.backend import current
from spmdzero.errors import SpmdZeroRuntimeError
from tests.support.engines import start

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

ON_JAX = current().name == "jax"
# What transformers takes by default on JAX, and what torch_xla has operations for.
IMPLEMENTATION = "grouped_mm" if ON_JAX else "batched_mm"
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "use_cache": False,
}
FAMILIES = ["Mixtral", "Qwen3Moe", "GptOss", "Qwen2Moe", "Olmoe", "Phimoe", "GraniteMoe"]
FAMILIES += ["DeepseekV3"]
MORE: dict[str, dict[str, Any]] = {
    "GptOss": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "rope_scaling": None,
    },
    # A shared expert, sigmoid routing in groups, latent keys and values; the first block is dense.
    "DeepseekV3": {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
IDS = torch.randint(1, 32, (8, 8), generator=torch.Generator().manual_seed(0))


def tiny(
    family: str, experts: str | None = IMPLEMENTATION, **more: Any
) -> transformers.PreTrainedModel:
    kind = getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(
        kind(**SHAPE | MORE.get(family, {}) | more)
    )
    if experts is not None:
        made.set_experts_implementation(experts)
    return made


def engine_of(model: torch.nn.Module, *, stage: int = 2, **spmd: Any) -> spmdzero.Engine:
    return start(
        model,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        gradient_clipping=0.0,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        zero_allow_untested_optimizer=True,
        spmd=spmd,
    )


def losses_of(engine: spmdzero.Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(input_ids=IDS, labels=IDS).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain_losses(model: Any, steps: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        # The mean of the rows' means, as of devices with a row each.
        loss = torch.stack([model(input_ids=row, labels=row).loss for row in IDS.split(1)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[1:])]
)
def test_experts_train_as_on_the_cpu(family: str) -> None:
    model = tiny(family)
    plain = copy.deepcopy(model)
    losses = losses_of(engine_of(model), 3)
    # Sums of fp32 in another order, over three steps; Phi's router has a comparison of floats.
    assert losses == pytest.approx(plain_losses(plain, 3), rel=2e-5)


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_deepseeks_blocks_train_as_shards_in_a_loop() -> None:
    model = tiny("DeepseekV3", num_hidden_layers=5)
    plain = copy.deepcopy(model)
    engine = engine_of(model, stage=3, scan="on", recompute="everything", min_shard_elements=0)
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        losses = losses_of(engine, 3)
    # fp32, as above.
    assert losses == pytest.approx(plain_losses(plain, 3), rel=2e-5)
    # Four of the blocks are equal.
    assert '"known_trip_count":{"n":"4"}' in texts[0]


def test_transformers_takes_grouped_products_by_default() -> None:
    assert tiny("Mixtral", experts=None).config._experts_implementation == "grouped_mm"


@pytest.mark.backends("torch_xla")
@pytest.mark.parametrize("forward", ["region", "global"])
def test_experts_without_operations_name_the_implementation_that_has_them(forward: str) -> None:
    engine = engine_of(tiny("Mixtral", experts="grouped_mm"), forward=forward)
    with pytest.raises(SpmdZeroRuntimeError, match=r'set_experts_implementation\("batched_mm"\)'):
        engine(input_ids=IDS, labels=IDS)
