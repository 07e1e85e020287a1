"""`spmdzero.zero`: ZeRO-3's contexts below stage 3, and DeepSpeed's estimate."""

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero import utils, zero
from tests.surface.test_gradient_access import batch, engine_of, make_model

BF16_ADAM = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
}


def test_init_builds_the_module_as_without_it() -> None:
    torch.manual_seed(0)
    with zero.Init(config_dict_or_path={"train_batch_size": 8, "zero_optimization": {"stage": 2}}):
        inside = nn.Linear(3, 2)
    torch.manual_seed(0)
    assert torch.equal(inside.weight, nn.Linear(3, 2).weight)


def test_init_refuses_a_config_where_it_is_written() -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 4}}
    with pytest.raises(spmdzero.SpmdZeroConfigError, match="stage"):
        zero.Init(config_dict_or_path=config)
    zero.Init(config_dict_or_path=config, enabled=False)


@pytest.mark.parametrize("several", [True, False])
def test_what_is_written_inside_of_gathered_parameters_survives_the_next_step(
    several: bool,
) -> None:
    engine = engine_of(make_model(), stage=2, gas=1, **BF16_ADAM)
    weight = engine.module.first.weight
    with (
        zero.GatheredParameters([weight] if several else weight, modifier_rank=0),
        torch.no_grad(),
    ):
        weight.fill_(0.5)
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu(), torch.full((10, 12), 0.5))
    engine.backward(engine(*(t.bfloat16() for t in batch(0))))
    engine.step()
    # Adam moves a weight by at most lr in its first step.
    assert (weight.detach().float().cpu() - 0.5).abs().max() < 5e-3


def test_masters_of_parameters_that_nobody_wrote_keep_their_precision() -> None:
    engine = engine_of(make_model(), stage=2, gas=1, **BF16_ADAM)
    engine.backward(engine(*(t.bfloat16() for t in batch(0))))
    engine.step()
    written, *others = engine.module.parameters()
    before = [utils.safe_get_full_fp32_param(other).cpu() for other in others]
    with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0), torch.no_grad():
        written.data.fill_(0.5)
    assert torch.equal(
        utils.safe_get_full_fp32_param(written).cpu(), torch.full(written.shape, 0.5)
    )
    after = [utils.safe_get_full_fp32_param(other).cpu() for other in others]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_without_a_modifier_rank_masters_stay_as_they_are() -> None:
    engine = engine_of(make_model(), stage=2, gas=1, **BF16_ADAM)
    weight = engine.module.first.weight
    before = utils.safe_get_full_fp32_param(weight).cpu()
    with zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
        weight.fill_(0.5)
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu(), before)


def test_an_external_parameter_needs_nothing() -> None:
    model = make_model()
    zero.register_external_parameter(model.first, model.second.weight)


# Printed by DeepSpeed 0.19.8 for these arguments.
PRINTED = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 2 nodes, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  254.90GB |   5.31GB | offload_optimizer=OffloadDeviceEnum.cpu
  127.45GB |   8.30GB | offload_optimizer=none
"""


def test_the_estimate_is_printed_as_deepspeed_prints_it(capsys) -> None:
    zero.estimate_zero2_model_states_mem_needs_all_cold(2851_000_000, 8, 2)
    assert capsys.readouterr().out == PRINTED
    zero.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 1000, bias=False))
    assert "1 node, 1 GPU per node.\nSW: Model with 1M total" in capsys.readouterr().out
