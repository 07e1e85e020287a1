"""DeepSpeed's calls at stage 3: parameters that rest as shards are read and written whole."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero import utils, zero
from spmdzero.backend import arrays
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.inspect import measure
from spmdzero.plan import Role
from tests.engine.test_stage_3 import ALL, Tied, batches, model
from tests.support import engines
from tests.support.selected import product_rows

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

partition_parameters = spmdzero.runtime.zero.partition_parameters
is_zero_param = partition_parameters.is_zero_param
BF16 = {"bf16": {"enabled": True}}
WEIGHT = "blocks.0.up.weight"


def start(module: nn.Module | None = None, **more: Any) -> spmdzero.Engine:
    module = model() if module is None else module
    return engines.start(module, **({"zero_optimization": ALL} | more))


def split(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if arrays.is_split(p)}


def test_an_engine_says_that_its_parameters_are_partitioned() -> None:
    engine = start()
    assert engine.zero_optimization_stage() == 3
    assert engine.zero_optimization_partition_weights()
    assert engine.zero_optimization_partition_gradients()


# -- saving ----------------------------------------------------------------------------------


def test_the_consolidated_state_dict_is_the_modules_on_the_cpu() -> None:
    engine = start(**BF16)
    engines.one_call(engine, *batches(1))
    state = engine._zero3_consolidated_16bit_state_dict()
    assert state.keys() == model().state_dict().keys()
    assert {(v.device.type, v.dtype) for v in state.values()} == {("cpu", torch.bfloat16)}
    assert state["head.weight"] is state["embed.weight"]
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(state[name], parameter.detach().cpu()), name
    # It is read, and nothing more: the parameters rest as before.
    assert WEIGHT in split(engine.module)


def test_the_consolidated_state_dict_leaves_frozen_parameters_out_if_it_is_told_so() -> None:
    module = model()
    module.embed.weight.requires_grad_(False)
    engine = start(module)
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert model().state_dict().keys() - state.keys() == {"embed.weight", "head.weight"}


def test_below_stage_3_there_is_no_consolidated_state_dict() -> None:
    engine = start(zero_optimization={"stage": 2})
    with pytest.raises(ValueError, match="module_state_dict"):
        engine._zero3_consolidated_16bit_state_dict()
    assert not engine.zero_gather_16bit_weights_on_model_save()


@pytest.mark.parametrize("told", [{}, {"stage3_gather_16bit_weights_on_model_save": True}])
def test_a_model_is_saved_whole_whatever_the_config_says(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    engine = start(zero_optimization=ALL | told)
    engines.one_call(engine, *batches(1))
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert engine.save_16bit_model(str(tmp_path))
    read = torch.load(tmp_path / "pytorch_model.bin")
    plain = model()
    plain.load_state_dict(read)
    assert torch.equal(plain.embed.weight, engine.module.embed.weight.detach().cpu())


# -- contexts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "precision"),
    [(lambda w: w.data.fill_(0.5), BF16), (lambda w: nn.init.constant_(w, 0.5), {})],
    ids=["data, bf16", "init, fp32"],
)
def test_what_is_written_into_gathered_parameters_is_what_the_next_step_starts_from(
    write: Callable[[torch.Tensor], Any], precision: dict[str, Any]
) -> None:
    engine = start(**precision)
    engines.three_calls(engine, *batches(1))
    weight = engine.module.get_parameter(WEIGHT)
    other = engine.module.get_parameter("blocks.1.up.weight")
    before = utils.safe_get_full_fp32_param(other).cpu()
    with zero.GatheredParameters([weight, other], modifier_rank=0):
        assert weight.shape == (256, 64)
        write(weight)
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu(), torch.full((256, 64), 0.5))
    assert torch.equal(utils.safe_get_full_fp32_param(other).cpu(), before)
    assert WEIGHT in split(engine.module)
    engines.three_calls(engine, *batches(1))
    moved = weight.detach().float().cpu() - 0.5
    # Adam moves a weight by about the rate of 1e-3.
    assert 0 < moved.abs().max() < 5e-3
    assert {s.numel() for s in arrays.local_shards(weight)} == {weight.numel() // 8}


def test_rows_that_are_written_alone_leave_the_others_as_they_are() -> None:
    engine = start()
    weight = engine.module.get_parameter(WEIGHT)
    expected = weight.detach().cpu().clone()
    with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight[3:5].zero_()
        weight.data[7] = 1.0
        weight[30:70, 2:5].fill_(2.0)
        weight.data[-1, ::2] = 3.0
    expected[3:5], expected[7], expected[30:70, 2:5], expected[-1, ::2] = 0.0, 1.0, 2.0, 3.0
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu(), expected)
    assert torch.equal(weight.detach().cpu(), expected)
    assert {s.numel() for s in arrays.local_shards(weight)} == {weight.numel() // 8}


def test_gathered_parameters_that_are_disabled_or_only_read_change_nothing() -> None:
    engine = start(**BF16)
    weight = engine.module.get_parameter(WEIGHT)
    master = utils.safe_get_full_fp32_param(weight).cpu()
    for how in ({"modifier_rank": None}, {"modifier_rank": 0, "enabled": False}):
        with zero.GatheredParameters(weight, **how):
            assert weight.data[3].shape == (64,)
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu(), master)
    assert WEIGHT in split(engine.module)


def test_gathered_parameters_are_read_whole() -> None:
    engine = start()
    with zero.GatheredParameters(engine.module.parameters()):
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter.detach().cpu(), model().get_parameter(name)), name
            assert parameter.data.sum().item() == pytest.approx(
                parameter.detach().cpu().sum().item(), rel=1e-4, abs=1e-4
            )


def test_init_refuses_what_stage_3_does_not_do_where_it_is_written() -> None:
    told = engines.config(zero_optimization=ALL | {"offload_param": {"device": "nvme"}})
    with pytest.raises(SpmdZeroConfigError, match="offload_param"):
        zero.Init(config_dict_or_path=told)


def test_a_module_of_shapes_only_gets_its_values_part_by_part() -> None:
    with utils.OnDevice(dtype=torch.bfloat16, device="meta"):
        half = Tied()
    assert {(p.device.type, p.dtype) for p in half.parameters()} == {("meta", torch.bfloat16)}
    assert torch.get_default_dtype() == torch.float32
    with utils.OnDevice(dtype=torch.float32, device="meta"):
        shapes = Tied()
    values = model().state_dict()
    engine = spmdzero.initialize(
        model=shapes, config=engines.config(zero_optimization=ALL), weights=values.__getitem__
    )[0]
    assert WEIGHT in split(engine.module)
    assert engines.one_call(engine, *batches(1)).item() == pytest.approx(
        engines.one_call(start(), *batches(1)).item(), rel=2e-6
    )


def test_what_stage_3_needs_no_telling_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module = model()
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        zero.register_external_parameter(module.head, module.embed.weight)
        partition_parameters.unregister_external_parameter(module.head, module.embed.weight)
        utils.set_z3_leaf_modules(module, [type(module.blocks[0])])
    said = [record.message for record in caplog.records]
    assert sum("register_external_parameter" in line for line in said) == 2
    assert sum("z3_leaf" in line for line in said) == 1
    assert utils.get_z3_leaf_modules(module) == list(module.blocks)


# -- writes ----------------------------------------------------------------------------------

BLOCKS = [f"blocks.{n}.{part}.weight" for n in (0, 1) for part in ("up", "down")]
FILLED, COPIED, CUT, SCALED = BLOCKS
GIVEN = "embed.weight"
WRITTEN = [*BLOCKS, GIVEN]


def overwrite(module: nn.Module) -> None:
    """Writes each of these weights in another way; one is computed before the next step."""
    module.get_parameter(FILLED).data.fill_(0.01)
    module.get_parameter(COPIED).data.copy_(torch.full((64, 256), 0.02))
    given = module.get_parameter(GIVEN)
    given.data = torch.full((128, 64), 0.03, device=given.device)
    module.get_parameter(CUT).data[3:200] = 0.0
    with torch.no_grad():
        module.get_parameter(SCALED).mul_(0.5)
    assert module.get_parameter(FILLED).sum().item() == pytest.approx(0.01 * 64 * 256, rel=1e-4)


class Banked(nn.Module):
    """A frozen layer, a trained one, and a buffer of weights: `[rows, 64]` -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.head = nn.Linear(64, 64, bias=False)
        self.register_buffer("bank", torch.randn(2, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x)).square().mean()


def test_a_parameter_that_is_given_a_view_of_a_buffer_is_the_buffers_part() -> None:
    losses = []
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for call in (engines.one_call, engines.three_calls):
        torch.manual_seed(0)
        engine = start(Banked(), zero_optimization=ALL)
        call(engine, rows)
        engine.module.base.weight.data = engine.module.bank[1]
        losses.append([call(engine, rows).item() for _ in range(2)])
        weight = engine.module.base.weight.detach().cpu()
        assert torch.equal(weight, engine.module.bank[1].cpu())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("trained", "call"),
    product_rows(
        (False, True),
        (engines.one_call, engines.three_calls),
        quick={(False, engines.one_call), (True, engines.three_calls)},
    ),
)
def test_what_a_script_overwrites_rests_as_shards_again_from_the_next_step_on(
    trained: bool, call: Callable[..., torch.Tensor]
) -> None:
    losses, values = [], []
    for stage in ({"stage": 2}, ALL):
        module = model()
        for name in WRITTEN:
            module.get_parameter(name).requires_grad_(trained)
        engine = start(module, zero_optimization=stage)
        losses.append([call(engine, batch).item() for batch in batches(4)])
        known = [c.kind for c in engine.programs.compilations]
        overwrite(engine.module)
        losses[-1] += [call(engine, batch).item() for batch in batches(2)]
        values.append({name: p.detach().cpu() for name, p in engine.module.named_parameters()})
    if call is engines.one_call and not trained:
        # What was written costs no other program of the step.
        assert [c.kind for c in engine.programs.compilations] == known
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    for name in WRITTEN:
        if not trained:
            assert torch.equal(values[1][name], values[0][name]), name
        weight = engine.module.get_parameter(name)
        assert {s.numel() for s in arrays.local_shards(weight)} == {weight.numel() // 8}, name
    assert measure(engine)[Role.PARAMETER] == engine.plan.memory()[Role.PARAMETER]


def test_what_a_script_overwrites_rests_as_shards_once_it_is_evaluated() -> None:
    module = model().requires_grad_(False)
    module.blocks[0].norm.requires_grad_(True)
    engine = start(module).eval()
    overwrite(engine.module)
    with torch.no_grad():
        assert torch.isfinite(engine(batches(1)[0])).item()
    assert {*WRITTEN} <= split(engine.module)
    assert torch.equal(module.get_parameter(FILLED).detach().cpu(), torch.full((256, 64), 0.01))


# -- tensors ---------------------------------------------------------------------------------


def test_states_and_gradients_are_read_and_set_as_a_whole() -> None:
    engine = start(**BF16)
    weight = engine.module.get_parameter(WEIGHT)
    engine.backward(engine(batches(1)[0]))
    value = torch.rand(256, 64)
    utils.safe_set_full_fp32_param(weight, value)
    utils.safe_set_full_grad(weight, torch.zeros(256, 64, dtype=torch.bfloat16))
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu(), value)
    assert torch.equal(weight.detach().cpu(), value.bfloat16())
    assert WEIGHT in split(engine.module)
    engine.step()
    # AdamW of a gradient of zero moves nothing, as its decay is 0 by default.
    assert torch.equal(utils.safe_get_full_fp32_param(weight).cpu(), value)
    for slot in ("exp_avg", "exp_avg_sq"):
        utils.safe_set_full_optimizer_state(weight, value, slot)
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, slot).cpu(), value)


def test_gradients_are_updated_together_and_rest_as_shards() -> None:
    engine = start()
    weight = engine.module.get_parameter(WEIGHT)
    engine.backward(engine(batches(1)[0]))
    gradient = utils.safe_get_full_grad(weight).cpu().clone()
    utils.safe_update_full_grad_vectorized([weight], lambda grad, parameter: grad * 2)
    assert torch.equal(utils.safe_get_full_grad(weight).cpu(), gradient * 2)
    engine.step()
    assert {s.numel() for s in arrays.local_shards(weight)} == {weight.numel() // 8}
    frozen = model()
    frozen.embed.weight.requires_grad_(False)
    held = start(frozen).module.embed.weight
    assert is_zero_param(held)
    assert utils.safe_get_full_fp32_param(held) is None


def test_one_local_part_is_refused_where_a_process_has_eight() -> None:
    weight = start().module.get_parameter(WEIGHT)
    for name, given in {
        "safe_get_local_fp32_param": (),
        "safe_get_local_grad": (),
        "safe_get_local_optimizer_state": ("exp_avg",),
        "safe_set_local_fp32_param": (torch.zeros(1),),
        "safe_set_local_grad": (torch.zeros(1),),
        "safe_set_local_optimizer_state": (torch.zeros(1), "exp_avg"),
    }.items():
        with pytest.raises(SpmdZeroUsageError, match=r"local_shards.*safe_set_full") as caught:
            getattr(utils, name)(weight, *given)
        assert "every device holds them whole" not in str(caught.value)


def test_a_model_is_unwrapped_for_generation_with_its_parameters_where_they_are() -> None:
    engine = start()
    with zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
        unwrapped.eval()
        assert torch.isfinite(unwrapped(batches(1)[0])).item()
    assert WEIGHT in split(engine.module)


def test_a_parameter_says_whether_it_rests_as_shards() -> None:
    engine = start(zero_optimization=ALL | {"stage3_param_persistence_threshold": 1000})
    assert is_zero_param(engine.module.get_parameter(WEIGHT))
    assert not is_zero_param(engine.module.get_parameter("blocks.0.norm.weight"))
    assert not is_zero_param(model().get_parameter(WEIGHT))
    assert not is_zero_param(start(zero_optimization={"stage": 2}).module.get_parameter(WEIGHT))


def test_a_parameter_has_deepspeeds_attributes_where_an_engine_of_stage_3_has_it() -> None:
    def named(module: nn.Module) -> set[str]:
        return {name for name, p in module.named_parameters() if hasattr(p, "ds_id")}

    plain = model()
    frozen = plain.get_parameter("blocks.1.up.weight").requires_grad_(False)
    engine = start(plain, zero_optimization=ALL | {"stage3_param_persistence_threshold": 100})
    parameters: dict[str, Any] = dict(engine.module.named_parameters())
    assert named(engine.module) == parameters.keys()
    assert len({p.ds_id for p in parameters.values()}) == len(parameters)
    available = partition_parameters.ZeroParamStatus.AVAILABLE
    for name, parameter in parameters.items():
        assert (parameter.ds_numel, parameter.ds_shape) == (parameter.numel(), parameter.shape)
        assert parameter.ds_status is available
        (kept, *_) = spmdzero.local_shards(parameter)
        assert parameter.partition_numel() == kept.numel(), name
        with pytest.raises(AttributeError, match="local_shards"):
            _ = parameter.ds_tensor
    assert parameters[WEIGHT].partition_numel() == parameters[WEIGHT].ds_numel / engine.mesh.size
    assert frozen is parameters["blocks.1.up.weight"]

    # What a forward sees has them too, beside a script's own.
    seen: list[Any] = []
    parameters[WEIGHT].own = "a script's"
    engine.module.get_submodule("blocks.0.up").register_forward_pre_hook(
        lambda part, _: seen.append((part.weight.ds_status, part.weight.ds_shape, part.weight.own))
    )
    engine(batches(1)[0])
    assert set(seen) == {(available, parameters[WEIGHT].shape, "a script's")}

    # Copies, and the module without its engine, are plain.
    assert named(copy.deepcopy(engine.module)) == set()
    assert not hasattr(pickle.loads(pickle.dumps(frozen)), "ds_id")
    spmdzero.engine.release(engine.module)
    assert named(engine.module) == named(start(zero_optimization={"stage": 2}).module) == set()
    assert named(model()) == set()
