"""`spmdzero.utils`: whole tensors of a parameter, and the small helpers, as DeepSpeed has them."""

import logging
from typing import Any

import pytest
import torch
from spmdzero.runtime.utils import clip_grad_norm_, get_global_norm, see_memory_usage
from spmdzero.utils.logging import print_dist, warning_once
from torch import nn

import spmdzero
from spmdzero import comm, utils
from spmdzero.backend import counters
from tests.surface.test_gradient_access import Regression, batch, engine_of, make_model

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}}
# fp32 on both sides, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def step(engine: spmdzero.Engine, index: int = 0) -> None:
    dtype = engine.module.first.weight.dtype
    engine.backward(engine(*(t.to(dtype) for t in batch(index))))
    engine.step()


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    made = engine_of(make_model(), stage=2, gas=1, bf16={"enabled": True}, **ADAM)
    step(made)
    return made


class TestTensorsOfAParameter:
    def test_the_master_is_fp32_and_the_parameter_is_its_cast(self, engine) -> None:
        for parameter in engine.module.parameters():
            master = utils.safe_get_full_fp32_param(parameter)
            assert master.dtype == torch.float32
            assert torch.equal(master.bfloat16().cpu(), parameter.detach().cpu())
        # Not only a cast: the bits that bf16 has not are there.
        assert not torch.equal(master.cpu(), master.bfloat16().float().cpu())

    def test_a_master_that_is_set_is_read_back_and_seen_by_forward(self, engine) -> None:
        parameter = engine.module.first.weight
        value = torch.full((10, 12), 1.0 + 2**-12)
        utils.safe_set_full_fp32_param(parameter, value)
        assert torch.equal(utils.safe_get_full_fp32_param(parameter).cpu(), value)
        assert torch.equal(parameter.detach().cpu(), torch.ones(10, 12, dtype=torch.bfloat16))

    def test_adams_states_are_those_of_torch(self) -> None:
        model = make_model()
        plain = make_model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
        plain(*batch(0)).backward()
        optimizer.step()
        engine = engine_of(model, stage=1, gas=1, **ADAM)
        step(engine)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                found = utils.safe_get_full_optimizer_state(ours, key)
                torch.testing.assert_close(found.cpu(), optimizer.state[theirs][key], **CLOSE)

    def test_states_of_every_param_group_are_there(self) -> None:
        # DeepSpeed's own finds those of the first group only.
        model = make_model()
        groups = [
            {"params": list(model.first.parameters())},
            {"params": list(model.second.parameters()), "lr": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        engine, *_ = spmdzero.initialize(
            model=model, optimizer=optimizer, config={"train_batch_size": 16}
        )
        step(engine)
        for parameter in model.parameters():
            state = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
            assert state.shape == parameter.shape
            assert state.abs().sum().item() > 0

    def test_a_state_that_is_set_is_read_back_and_used(self, engine) -> None:
        parameter = engine.module.second.weight
        utils.safe_set_full_optimizer_state(parameter, torch.full((1, 10), 100.0), "exp_avg")
        before = utils.safe_get_full_fp32_param(parameter).cpu()
        state = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert torch.equal(state.cpu(), torch.full((1, 10), 100.0))
        step(engine)
        after = utils.safe_get_full_fp32_param(parameter).cpu()
        # A first moment of 100 outweighs any gradient of this model.
        assert (after < before).all()

    def test_setting_does_not_make_the_step_another_program(self, engine) -> None:
        for _ in range(2):
            step(engine)
        parameter = engine.module.first.weight
        master = utils.safe_get_full_fp32_param(parameter).cpu()
        utils.safe_set_full_fp32_param(parameter, master)
        state = utils.safe_get_full_optimizer_state(parameter, "exp_avg").cpu()
        utils.safe_set_full_optimizer_state(parameter, state, "exp_avg")
        compiled = counters.compiled()[0]
        step(engine)
        assert counters.compiled()[0] == compiled

    def test_an_unknown_state_is_refused_with_those_there_are(self, engine) -> None:
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="it keeps: exp_avg, exp_avg_sq"):
            utils.safe_get_full_optimizer_state(engine.module.first.bias, "momentum")
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="has shape"):
            utils.safe_set_full_fp32_param(engine.module.first.bias, torch.zeros(3))

    def test_a_parameter_of_no_engine_has_none(self) -> None:
        parameter = nn.Parameter(torch.ones(3))
        assert utils.safe_get_full_fp32_param(parameter) is None
        assert utils.safe_get_full_optimizer_state(parameter, "exp_avg") is None
        assert utils.safe_get_full_grad(parameter) is None

    def test_gradients_are_read_set_and_updated(self) -> None:
        engine = engine_of(make_model(), stage=2, gas=1)
        weight, bias = engine.module.first.weight, engine.module.first.bias
        engine.backward(engine(*batch(0)))
        assert utils.safe_get_full_grad(weight) is weight.grad
        utils.safe_set_full_grad(weight, torch.ones(10, 12))
        before = bias.grad.cpu()
        utils.safe_update_full_grad_vectorized([weight, bias], lambda grad, _: grad * 3)
        assert torch.equal(weight.grad.cpu(), torch.full((10, 12), 3.0))
        assert torch.equal(bias.grad.cpu(), before * 3)
        start = weight.detach().cpu()
        engine.step()
        # SGD with lr 0.1 on a gradient of 3.
        torch.testing.assert_close(weight.detach().cpu(), start - 0.1 * 3, **CLOSE)

    def test_an_engine_without_an_optimizer_says_so(self) -> None:
        engine, *_ = spmdzero.initialize(model=make_model(), config={"train_batch_size": 16})
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="without an optimizer"):
            utils.safe_get_full_fp32_param(engine.module.first.weight)


class TestModuleMethods:
    def test_loading_a_state_dict_reaches_the_masters(self, engine) -> None:
        state = make_model().state_dict()
        engine.load_module_state_dict({"module": state})
        for name, parameter in engine.module.named_parameters():
            found = utils.safe_get_full_fp32_param(parameter).cpu()
            assert torch.equal(found, state[name].bfloat16().float())

    def test_a_custom_loader_reaches_the_masters(self, engine) -> None:
        def fill(src: Any, dst: nn.Module) -> None:
            with torch.no_grad():
                for parameter in dst.parameters():
                    parameter.fill_(src)

        engine.load_module_state_dict({"module": 0.5}, custom_load_fn=fill)
        master = utils.safe_get_full_fp32_param(engine.module.first.weight)
        assert torch.equal(master.cpu(), torch.full((10, 12), 0.5))

    def test_missing_names_are_allowed_by_name_only(self, engine) -> None:
        state = make_model().state_dict()
        del state["first.bias"]
        engine.load_module_state_dict({"module": state}, allowed_missing_keys=["first.bias"])
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"missing \['first.bias'\]"):
            engine.load_module_state_dict({"module": state}, allowed_missing_keys=["x"])

    def test_frozen_parameters_can_be_left_out_of_the_state_dict(self) -> None:
        model = make_model()
        model.first.requires_grad_(False)
        engine = engine_of(model, stage=2, gas=1)
        assert set(engine.module_state_dict()) == set(Regression().state_dict())
        left = engine.module_state_dict(exclude_frozen_parameters=True)
        assert set(left) == {"second.weight", "second.bias"}

    def test_deepspeed_io_loads_in_order_off_the_train_route(self, engine) -> None:
        data = [(torch.full((12,), float(i)), torch.tensor(float(i))) for i in range(32)]
        loader = engine.deepspeed_io(data, route="eval")
        rows = next(iter(loader))[1].cpu()
        # Device r has rows r and r + 8, as DeepSpeed's rank r would.
        assert rows.tolist() == [i for r in range(8) for i in (r, r + 8)]
        for wrong in ({"batch_size": 3}, {"data_sampler": [0]}):
            with pytest.raises(spmdzero.SpmdZeroUsageError, match="deepspeed_io"):
                engine.deepspeed_io(data, **wrong)
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="torch Dataset"):
            engine.deepspeed_io(5)

    def test_calls_without_meaning_do_nothing(self, engine) -> None:
        engine.allreduce_gradients()
        with engine.coalesce_grad_reduction():
            engine.backward(engine(*(t.bfloat16() for t in batch(0))))
        engine.step()
        engine.destroy()


class TestLogging:
    def test_lines_come_from_the_named_ranks_once_processes_are_connected(self, caplog) -> None:
        comm.init_distributed()
        with caplog.at_level(logging.INFO, logger="spmdzero"):
            utils.log_dist("first", ranks=[0])
            utils.log_dist("all", ranks=[-1])
            utils.log_dist("other", ranks=[1])
            utils.log_dist("none")
            for _ in range(2):
                utils.log_dist_once("once", ranks=[0])
                warning_once("twice is once")
        assert caplog.messages == [
            "[Rank 0] first",
            "[Rank 0] all",
            "[Rank 0] once",
            "twice is once",
        ]

    def test_print_dist_prints_where_log_dist_logs(self, capsys) -> None:
        comm.init_distributed()
        print_dist("here", ranks=[0])
        print_dist("not here", ranks=[1])
        assert capsys.readouterr().out == "[Rank 0] here\n"

    def test_a_client_that_silences_deepspeeds_logger_leaves_our_lines(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        # transformers' `deepspeed_init` does so.
        level = utils.logger.level
        utils.logger.setLevel(logging.WARNING)
        try:
            engine_of(make_model(), stage=2, gas=1, **ADAM)
            utils.logger.info("a script's line")
        finally:
            utils.logger.setLevel(level)
        assert "ZeRO-2" in caplog.text
        assert "a script's line" not in caplog.text

    def test_a_level_by_name(self) -> None:
        own = logging.getLogger("test_a_level_by_name")
        own.addHandler(logging.NullHandler())
        utils.set_log_level_from_string("ERROR", own)
        assert own.level == own.handlers[0].level == logging.ERROR
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="'loud' is no log level"):
            utils.set_log_level_from_string("loud", own)


class TestHelpers:
    def test_a_repeating_loader_starts_again(self) -> None:
        loader = utils.RepeatingLoader([1, 2])
        assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]

    def test_nested_attributes(self) -> None:
        model = make_model()
        assert utils.recursive_getattr(model, "first.bias") is model.first.bias
        utils.recursive_setattr(model, "first.extra", 3)
        assert model.first.extra == 3

    def test_on_device_builds_shapes_in_a_dtype(self) -> None:
        with utils.OnDevice(dtype=torch.bfloat16):
            layer = nn.Linear(3, 2)
        assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
        with utils.OnDevice(dtype=torch.bfloat16, enabled=False):
            layer = nn.Linear(3, 2)
        assert (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32)

    def test_leaf_modules_are_found_as_they_were_flagged(self) -> None:
        model = make_model()
        assert utils.set_z3_leaf_modules(model, [nn.Linear]) == [model.first, model.second]
        assert utils.get_z3_leaf_modules(model) == [model.first, model.second]
        utils.unset_z3_leaf_modules(model, ["Linear"])
        assert utils.get_z3_leaf_modules(model) == []
        found = utils.set_z3_leaf_modules_by_name(model, ["first", "x"], raise_if_not_found=False)
        assert found == ([model.first], ["x"])
        assert utils.set_z3_leaf_modules_by_suffix(model, ["ond"]) == ([model.second], [])
        assert utils.z3_leaf_module(model.second)
        assert not utils.z3_leaf_parameter(model.second.bias)
        for call in (
            lambda: utils.set_z3_leaf_modules(model, [nn.Conv2d]),
            lambda: utils.set_z3_leaf_modules_by_name(model, ["x"]),
            lambda: utils.set_z3_leaf_modules_by_suffix(model, ["x"]),
        ):
            with pytest.raises(spmdzero.SpmdZeroUsageError, match="found in the model"):
                call()

    def test_groups_have_one_process_and_no_model_parallelism(self) -> None:
        assert utils.groups.get_data_parallel_world_size() == 1
        assert utils.groups.get_data_parallel_rank() == 0
        assert utils.groups.get_data_parallel_group().size() == 1
        assert utils.groups.get_model_parallel_world_size() == 1
        assert utils.groups.get_model_parallel_group() is None
        assert utils.groups.get_tensor_model_parallel_src_rank() == 0

    def test_named_functions_still_return(self) -> None:
        assert utils.instrument_w_nvtx(lambda a, b: a + b)(1, b=2) == 3

    def test_clipping_and_norms_by_deepspeeds_names(self) -> None:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        assert clip_grad_norm_([parameter], 1.0).item() == 5.0
        assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
        assert get_global_norm([3.0, 4.0]) == 5.0

    def test_memory_is_printed_when_forced(self, capsys) -> None:
        see_memory_usage("quiet")
        see_memory_usage("after the model", force=True)
        printed = capsys.readouterr().out
        assert printed.startswith("after the model\nMA ")
        assert "quiet" not in printed
