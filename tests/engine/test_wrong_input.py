"""Mistakes that users make, each with an error that says what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import spmdzero
from spmdzero import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.backend import current
from spmdzero.errors import ReplicaRegionError
from tests.support.bounds import assert_summed
from tests.support.engines import Mean, start

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    } | more


def make_engine(**more: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(model=nn.Linear(4, 3), config=config(**more))
    return engine


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    return make_engine()


def refused(match: str, *, model: Any = None, **more: Any) -> Exception:
    """What `initialize` says to a model, or to its other arguments."""
    arguments = {"model": nn.Linear(4, 3) if model is None else model, "config": config()} | more
    with pytest.raises((SpmdZeroConfigError, SpmdZeroUsageError), match=match) as caught:
        spmdzero.initialize(**arguments)
    return caught.value


CONFIGS: dict[str, dict[str, Any]] = {
    r"33.*2.*8": {"train_batch_size": 33},
    r"no such ZeRO stage": {"zero_optimization": {"stage": 4}},
    "zero_optimization.offload_optimizer.device.*NVMe": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    },
    "check_grad_overflow": {"bf16": {"check_grad_overflw": True}},
    "forward has no input named nope": {"spmd": {"batch_dim": {"nope": 1}}},
    "communication_data_type": {
        "communication_data_type": "bf16",
        "spmd": {"forward": "global"},
    },
}


@pytest.mark.parametrize("match", CONFIGS)
def test_a_config_that_can_not_be_honoured_names_its_key_and_what_to_do(match: str) -> None:
    error = refused(match, config=config(**CONFIGS[match]))
    assert isinstance(error, SpmdZeroConfigError)
    assert error.key.split(".")[0] in CONFIGS[match]
    if "zero_optimization" in CONFIGS[match]:
        assert error.fix


def test_a_config_file_that_is_missing_or_malformed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    refused(str(file), config=str(file))
    file.write_text('{\n  "train_batch_size": 16,\n  "bf16": {"enabled": tru}\n}')
    refused(r"line 3.*column 23", config=str(file))


def test_a_model_that_can_not_be_trained_is_refused_with_the_reason() -> None:
    # Fake, so that it needs no such device.
    elsewhere = FakeTensor(FakeTensorMode(), torch.empty(3, 4, device="meta"), torch.device("cuda"))
    away, hooked, other = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
    away.weight = nn.Parameter(elsewhere)
    hooked.weight.register_hook(lambda grad: grad * 0)
    refused(r"weight is on cuda.*Build it on the CPU", model=away)
    refused("bfloat16, but the config asks for fp32", model=nn.Linear(4, 3).bfloat16())
    refused('float16, .* set "fp16"', model=nn.Linear(4, 3).half())
    refused(r"float64, .*Call model.float\(\)$", model=nn.Linear(4, 3).double())
    autocast = config(torch_autocast={"enabled": True})
    fix = r'Call model.float\(\), .*or turn torch_autocast off and set "bf16"'
    refused(fix, model=nn.Linear(4, 3).bfloat16(), config=autocast)
    refused("needs a torch.nn.Module, got str", model="gpt2")
    refused("weight has a gradient hook", model=hooked)
    refused("nothing to train", model=nn.Linear(4, 3).requires_grad_(False))
    used_up = other.parameters()
    list(used_up)
    refused("nothing to train", model=other, model_parameters=used_up)
    refused(r"not model.named_parameters\(\)", model_parameters=other.named_parameters())
    refused("not a parameter of the model", model_parameters=other.parameters())


# bitsandbytes' own classes, which is not installed, are of these names. tests/stacks has the real
# ones.
KIND: Any = type("Int8Params", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})


def test_weights_of_bitsandbytes_that_have_no_values_are_refused() -> None:
    model = nn.Linear(4, 3)
    model.weight = KIND(torch.ones(3, 4), requires_grad=False)
    refused("weight is a Int8Params of bitsandbytes that isn't quantized", model=model)
    table = nn.Embedding(4, 3)
    table.weight = KIND(torch.ones(4, 3, dtype=torch.int8), requires_grad=False)
    refused("weight is a Int8Params of bitsandbytes in a Embedding: linear layers", model=table)


def test_linear_layers_of_bitsandbytes_become_plain_ones_of_the_same_values() -> None:
    class Quantized(nn.Linear):
        """Computes otherwise than its class says."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    model = nn.Sequential(Quantized(4, 3), nn.Linear(3, 2))
    few = torch.randint(-127, 128, (3, 4), dtype=torch.int8)
    model[0].weight = KIND(few, requires_grad=False)
    model[0].weight.SCB = torch.tensor([1.0, 2.0, 0.5])
    engine = spmdzero.initialize(model=model, config=config())[0]
    assert type(engine.module[0]) is nn.Linear
    values = few * torch.tensor([[1.0], [2.0], [0.5]]) / 127
    torch.testing.assert_close(engine.module[0].weight.cpu(), values)
    assert not engine.plan["0.weight"].trainable
    x = torch.randn(16, 4)
    expected = torch.nn.functional.linear(x, values, model[0].bias.detach().cpu())
    torch.testing.assert_close(engine.module[0](x.to(engine.device)).detach().cpu(), expected)


def test_a_schedule_that_could_change_nothing() -> None:
    model = nn.Linear(4, 3)
    stray = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"model": model}
    given["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(stray, 2)
    refused("bound to an optimizer that was not passed", **given)
    without = {"train_micro_batch_size_per_gpu": 2}
    refused("schedule without an optimizer", config=without, **given)


def test_an_optimizer_that_deepspeed_doesnt_test_is_refused_as_by_its_assert() -> None:
    model = nn.Linear(4, 3)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    sharded = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    caught = refused("zero_allow_untested.*SGD", model=model, config=sharded, **given)
    assert isinstance(caught, AssertionError)


def test_wrong_row_counts_name_both_numbers(engine: spmdzero.Engine) -> None:
    with pytest.raises(
        SpmdZeroUsageError, match=r"has 12 rows.*16 = .*\(2\) x 8 local.*\(batch_size=16\)"
    ):
        engine(torch.zeros(12, 4))
    engine.eval()
    with torch.no_grad():
        # Evaluation takes any number.
        assert engine(torch.zeros(24, 4)).shape == (24, 3)
    engine.train()


def test_calls_in_another_order_say_which_comes_first(engine: spmdzero.Engine) -> None:
    with torch.no_grad():
        loss = engine(torch.zeros(16, 4)).mean()
    for no_loss in (torch.tensor(1.0), loss):
        with pytest.raises(SpmdZeroUsageError, match="without a forward"):
            engine.backward(no_loss)
    with pytest.raises(SpmdZeroUsageError, match=r"before engine.backward\(loss\)"):
        engine.step()
    with pytest.raises(SpmdZeroUsageError, match=r"scalar loss, got \[16, 3\].*loss.mean\(\)"):
        engine.backward(engine(torch.ones(16, 4)))
    with pytest.raises(SpmdZeroUsageError, match=r"got list: make an iterator with iter"):
        engine.train_batch([torch.zeros(16, 4)])  # type: ignore[arg-type]


def test_step_without_an_optimizer() -> None:
    engine, optimizer, loader, scheduler = spmdzero.initialize(
        model=nn.Linear(4, 3), config={"train_micro_batch_size_per_gpu": 2}
    )
    assert (optimizer, loader, scheduler) == (None, None, None)
    engine.backward(engine(torch.ones(16, 4)).mean())
    with pytest.raises(SpmdZeroUsageError, match="without an optimizer"):
        engine.step()


def test_an_error_inside_of_forward_names_the_line_and_the_cast() -> None:
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"test_wrong_input.py:\d+.*addmm"):
        make_engine()(torch.ones(16, 5))
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"bfloat16 and float32. Cast the input"):
        make_engine(bf16={"enabled": True})(torch.ones(16, 4))


def test_a_gradient_hook_is_refused_since_it_would_never_run() -> None:
    engine = make_engine()
    engine.module.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(SpmdZeroUsageError, match="weight has a gradient hook"):
        engine(torch.ones(16, 4))


def test_data_that_ends_in_mid_step_leaves_an_engine_that_can_go_on() -> None:
    engine = make_engine(gradient_accumulation_steps=3)
    engine.module.forward = lambda x: nn.Linear.forward(engine.module, x).mean()
    with pytest.raises(SpmdZeroUsageError, match="ended after 2 of 3 micro-batches"):
        engine.train_batch(iter([torch.zeros(16, 4)] * 2))
    assert (engine.micro_steps, engine.global_steps) == (0, 0)
    engine.train_batch(iter([torch.ones(16, 4)] * 3))
    assert (engine.micro_steps, engine.global_steps) == (3, 1)


@pytest.mark.parametrize("as_buffer", [False, True], ids=["attribute", "new buffer"])
def test_a_tensor_that_forward_keeps_is_refused_since_its_use_would_abort(as_buffer: bool) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if as_buffer:
                self.register_buffer("auxiliary", x.mean())
            else:
                self.auxiliary = x.mean()
            return super().forward(x)

    engine, *_ = spmdzero.initialize(model=nn.Sequential(Keeps(4, 3)), config=config())
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"attribute '0.auxiliary'.*return it"):
        engine(torch.ones(16, 4))


def test_plateau_asks_for_its_metric_before_the_update() -> None:
    engine = make_engine(scheduler={"type": "ReduceLROnPlateau", "params": {}})
    engine.backward(engine(torch.ones(16, 4)).mean())
    with pytest.raises(SpmdZeroUsageError, match=r"lr_kwargs=\{"):
        engine.step()
    engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.global_steps == 1


def test_an_input_on_the_cpu_that_requires_a_gradient_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(Mean())
    plain = torch.ones(8, 4, requires_grad=True)
    (plain @ engine.module.line.weight.detach().cpu().T).mean().backward()
    for _ in range(2):
        # One that was moved has torch's gradient, and nothing is said.
        x = torch.ones(8, 4).to(engine.device).requires_grad_()
        engine.backward(engine(x))
        assert_summed(x.grad.cpu(), plain.grad)
        engine.zero_grad()
    assert "requires a gradient, which" not in caplog.text
    for _ in range(2):
        x = torch.ones(8, 4, requires_grad=True)
        engine.backward(engine(x))
        assert x.grad is None
        engine.zero_grad()
    (line,) = [line for line in caplog.messages if "requires a gradient, which" in line]
    assert "input 'x'" in line
    assert "x.to(engine.device).requires_grad_()" in line


def test_an_output_that_is_named_and_not_there_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(spmd={"outputs": {"los": "sum"}})
    with caplog.at_level("WARNING", logger="spmdzero"):
        engine(torch.ones(16, 4))
        engine(torch.ones(16, 4))
    assert len([r for r in caplog.records if "names los" in r.message]) == 1


def test_a_global_forward_says_that_autocast_leaves_the_wire_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    autocast = {"enabled": True, "dtype": "bfloat16"}
    with caplog.at_level("WARNING", logger="spmdzero"):
        make_engine(torch_autocast=autocast)
        assert not caplog.records
        make_engine(torch_autocast=autocast, spmd={"forward": "global"})
    assert "reduces gradients in their own dtype" in caplog.text


class TestNotFinite:
    def test_check_finite_raises_before_the_update(self) -> None:
        engine = make_engine(spmd={"check_finite": True})
        good, bad = torch.ones(16, 4), torch.full((16, 4), float("inf"))
        engine.backward(engine(good).mean())
        engine.step()
        before = engine.module.weight.cpu().clone()
        engine.backward(engine(bad).mean())
        with pytest.raises(spmdzero.NonFiniteError, match="at step 1: parameters and optimizer"):
            engine.step()
        assert torch.equal(engine.module.weight.cpu(), before)
        assert torch.isfinite(before).all()
        engine.backward(engine(good).mean())
        engine.step()
        assert engine.global_steps == 2
        assert torch.isfinite(engine.module.weight.cpu()).all()
        engine.backward(engine(bad).mean())
        with pytest.raises(spmdzero.NonFiniteError, match="at step 2"):
            engine.step()
        assert not engine.was_step_applied()

    def test_otherwise_the_log_names_the_step(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = make_engine(steps_per_print=3)
        for step in range(3):
            engine.backward((engine(torch.ones(16, 4)) * (torch.nan if step == 1 else 1.0)).mean())
            with caplog.at_level("INFO", logger="spmdzero"):
                engine.step()
        assert [r.message for r in caplog.records if "not finite at step 1" in r.message]

    def test_bf16_skips_the_update_as_deepspeed_does(self) -> None:
        engine = make_engine(bf16={"enabled": True})
        before = engine.module.weight.cpu().clone()
        engine.backward((engine(torch.ones(16, 4).bfloat16()) * torch.nan).mean())
        engine.step()
        assert torch.equal(engine.module.weight.cpu(), before)
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert not engine.was_step_applied()
        engine.backward(engine(torch.ones(16, 4).bfloat16()).mean())
        engine.step()
        assert engine.skipped_steps == 1
        assert engine.was_step_applied()
        assert not torch.equal(engine.module.weight.cpu(), before)


class Turned(nn.Module):
    """A module with an attribute that its constructor computes of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.line.turned = self.line.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.line.turned


def test_an_attribute_computed_of_a_parameter_is_named() -> None:
    error = refused(r"test_wrong_input.py:\d+: line.weight", model=Turned())
    assert "the attribute 'line.turned' was computed of it before initialize" in str(error)
    assert "Compute it in the forward" in str(error)


def test_a_penalty_of_parameters_is_let_go_of_before_initialize() -> None:
    model = nn.Linear(4, 4)
    penalty = sum(p.square().sum() for p in model.parameters())
    error = refused(r"test_wrong_input.py:\d+: weight can't move", model=model)
    assert "such as a penalty" in str(error)
    del penalty
    engine, *_ = spmdzero.initialize(model=model, config=config())
    assert_summed(
        engine(torch.ones(16, 4)).cpu(), model(torch.ones(16, 4, device=engine.device)).cpu()
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_old_norms_are_refused_and_what_the_error_names_trains(norm: str) -> None:
    x = torch.linspace(-1, 1, 64).reshape(16, 4)

    def trained(make: Any, forward: str = "region") -> torch.Tensor:
        torch.manual_seed(0)
        engine, *_ = spmdzero.initialize(
            model=nn.Sequential(make(nn.Linear(4, 4))),
            config=config() | {"spmd": {"forward": forward}},
        )
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.cpu()

    with pytest.raises((SpmdZeroUsageError, ReplicaRegionError)) as e:
        trained(getattr(nn.utils, norm))
    assert f"Use torch.nn.utils.parametrizations.{norm}" in str(e.value)
    assert "'0.weight'" in str(e.value)
    torch.manual_seed(0)
    model = nn.Sequential(getattr(nn.utils.parametrizations, norm)(nn.Linear(4, 4)))
    # torch_xla has no lowering of what they call, and its error names this way.
    forward = "region" if current().world_of_devices else "global"
    right = model(x).square().mean()
    assert_summed(trained(getattr(nn.utils.parametrizations, norm), forward), right)
