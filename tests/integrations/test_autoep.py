"""`expert_parallel`, DeepSpeed's AutoEP: mixtures of transformers, beside DeepSpeed's ranks."""

import json
import logging
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays, current
from spmdzero.errors import SpmdZeroConfigError
from tests.oracle.autoep import OUT, config_of, model_of, tokens

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

RECORDED: dict[str, dict[str, list[float]]] = json.loads(OUT.read_text())


def started(preset: str, stage: int, **more: Any) -> spmdzero.Engine:
    # DeepSpeed's two ranks have four rows each, eight devices one.
    config = config_of(preset, stage=stage, micro=1)
    config["expert_parallel"] |= more
    # DeepSpeed's default leaves parameters of fewer elements whole.
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = model_of(preset)
    if current().name != "jax":
        # torch_xla has no operation for the products that transformers takes by default.
        model.set_experts_implementation("batched_mm")
    return spmdzero.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("run", RECORDED)
def test_a_mixture_trains_with_deepspeeds_losses(
    run: str, mesh: object, caplog: pytest.LogCaptureFixture
) -> None:
    preset, stage = run.split()
    with caplog.at_level(logging.INFO, "spmdzero"):
        engine = started(preset, int(stage))
    rest = "rest as shards" if stage == "3" else "rest whole at stage 2"
    assert (
        f"by all 4 experts, none left out, with DeepSpeed's losses; experts {rest}" in caplog.text
    )
    losses, norms = [], []
    for step in tokens():
        mean = 0.0
        for rows in step:
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            engine.step()
            mean += loss.item() / len(step)
        losses.append(mean)
        norms.append(float(engine.get_global_grad_norm() or 0))
    # fp32; sums over tokens and devices are in another order.
    assert losses == pytest.approx(RECORDED[run]["losses"], rel=1e-6)
    assert norms == pytest.approx(RECORDED[run]["norms"], rel=1e-5)


def test_experts_are_shards_at_stage_3(mesh: object) -> None:
    engine = started("mixtral", 3)
    experts = [p for name, p in engine.module.named_parameters() if ".experts." in name]
    assert experts
    for parameter in experts:
        held = [shard.numel() for shard in arrays.local_shards(parameter)]
        assert held == [parameter.numel() // 8] * 8


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_k", 1), ("score_func", "sigmoid"), ("load_balance_coeff", 0.1), ("route_scale", 2.0)],
)
def test_other_routing_than_the_models_is_refused(key: str, value: Any, mesh: object) -> None:
    with pytest.raises(SpmdZeroConfigError, match=f"expert_parallel.{key}.*the model's config"):
        started("mixtral", 2, **{key: value})


def test_a_section_that_is_off_may_hold_anything(mesh: object) -> None:
    started("mixtral", 2, enabled=False, top_k=1)


def test_a_model_without_experts_is_told(mesh: object, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("mixtral", stage=2, micro=1)
    with caplog.at_level(logging.INFO, "spmdzero"):
        spmdzero.initialize(model=torch.nn.Linear(4, 4), config=config)
    assert "expert_parallel has no effect" in caplog.text
