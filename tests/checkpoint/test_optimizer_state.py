"""`optimizer.state_dict()` in a file of the user's: training goes on as from a checkpoint."""

import io
from typing import Any

import pytest
import torch

import spmdzero
from tests.checkpoint.runs import assert_state, config, make_model, start, train, whole_state

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The scale doubles in the second step.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}},
}


def through_a_file(content: Any) -> Any:
    """What `torch.load` makes of it: nothing of a device, nothing that runs code."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "fp16"))]
)
def test_training_goes_on_from_the_state_dicts_of_module_and_optimizer(precision: str) -> None:
    settings = config(2, **PRECISIONS[precision])
    del settings["scheduler"]
    engine, fresh = start(settings), start(settings)
    train(engine, range(3))
    module, optimizer = through_a_file([engine.module.state_dict(), engine.optimizer.state_dict()])
    before = whole_state(engine)
    torch.manual_seed(7)  # of the dropout
    train(engine, range(3, 5))
    undisturbed = whole_state(engine)
    for each in (engine, fresh):
        each.module.load_state_dict(module)
        each.optimizer.load_state_dict(optimizer)
        assert_state(each, before)
        assert each.named_tensors()["counter/applied"].item() == 3
        assert each.optimizer.loss_scale == (32.0 if precision == "fp16" else 1.0)
    # Of itself, which a plain torch optimizer rounds to the parameter's dtype.
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    torch.manual_seed(7)
    train(engine, range(3, 5))
    assert_state(engine, undisturbed)


def test_a_state_dict_is_of_the_models_shapes_and_fits_torchs_own_optimizer() -> None:
    engine = start(config(2))
    train(engine, range(2))
    saved = engine.optimizer.state_dict()
    model = make_model()
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(saved)
    for parameter in model.parameters():
        state = plain.state[parameter]
        assert state["step"] == 2
        assert state["exp_avg"].shape == parameter.shape
    # And back: torch has made the same count and moments of it.
    fresh = start(config(2))
    fresh.optimizer.load_state_dict(plain.state_dict())
    states = {name: tensor for name, tensor in whole_state(engine).items() if "exp_avg" in name}
    assert {n: t for n, t in whole_state(fresh).items() if "exp_avg" in n}.keys() == states.keys()
    assert all(torch.equal(whole_state(fresh)[name], state) for name, state in states.items())
    assert fresh.named_tensors()["counter/applied"].item() == 2


def test_momentum_of_torchs_sgd_which_counts_no_updates_is_gone_on_with() -> None:
    def steps(seed: int) -> torch.Tensor:
        return torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))

    model, plain = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    for seed in range(2):
        if seed == 1:
            model.load_state_dict(plain.state_dict())
            saved = optimizer.state_dict()
            engine = spmdzero.initialize(
                model=model,
                config={
                    "train_batch_size": 16,
                    "gradient_clipping": 0,
                    "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
                    "zero_allow_untested_optimizer": True,
                    "zero_optimization": {"stage": 1},
                },
            )[0]
            engine.optimizer.load_state_dict(through_a_file(saved))
            engine.backward(engine(steps(seed)).square().mean())
            engine.step()
        optimizer.zero_grad()
        plain(steps(seed)).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        # One fp32 step of lr 0.1: gradients are summed in another order.
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-6)


def test_states_of_another_optimizer_are_refused_and_nothing_changes() -> None:
    engine = start(config(2, bf16={"enabled": True}))
    train(engine, range(1))
    before, saved = whole_state(engine), engine.optimizer.state_dict()
    first = saved["state"][0]
    wrong: list[tuple[str, Any]] = [
        ("takes what optimizer.state_dict", [saved]),
        ("takes what optimizer.state_dict", {"module": {}}),
        ("have \\[7\\] parameters", saved | {"param_groups": [{"params": list(range(7))}]}),
        ("momentum_buffer", saved | {"state": {0: {"momentum_buffer": first["exp_avg"]}}}),
        ("exp_avg of body.0.weight has shape", _with(saved, exp_avg=torch.zeros(3))),
    ]
    for said, content in wrong:
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=said):
            engine.optimizer.load_state_dict(content)
    assert_state(engine, before)
    engine.optimizer.load_state_dict(saved | {"state": {}})
    state = whole_state(engine)
    assert not any(t.any() for name, t in state.items() if name.startswith("exp_avg"))
    assert torch.equal(state["master/odd.weight"], before["master/odd.weight"])


class Hooks:
    """All hooks that torch has around an optimizer's state dict; notes their calls.

    The first saves and loads another lr, by a dict of its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _: self.calls.append("before saving"))
        optimizer.register_state_dict_post_hook(self.saved)
        optimizer.register_state_dict_post_hook(self.seen)
        optimizer.register_load_state_dict_pre_hook(self.loading)
        optimizer.register_load_state_dict_post_hook(self.loaded)

    def saved(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        self.calls.append("saved")
        return {"whole": saved, "note": "mine"}

    def seen(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        self.calls.append(f"saw {sorted(saved)}")
        saved["moment"] = saved["whole"]["state"][0]["exp_avg"].cpu()

    def loading(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(f"loading {sorted(given)}")
        given.clear()
        whole = self.whole
        return whole | {"param_groups": [g | {"lr": 0.5} for g in whole["param_groups"]]}

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append(f"loaded {optimizer.param_groups[0]['lr']}")
        # Plain torch runs it with autograd on.
        assert torch.is_grad_enabled()

    whole: dict[str, Any]


def test_hooks_of_a_state_dict_are_called_and_change_it_as_in_torch() -> None:
    engine = start(config(2))
    train(engine, range(1))
    before, whole = whole_state(engine), engine.optimizer.state_dict()
    model = make_model()
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(whole)
    called = []
    for optimizer in (plain, engine.optimizer):
        hooks = Hooks(optimizer)
        hooks.whole = whole
        saved = optimizer.state_dict()
        assert saved.keys() == {"whole", "note", "moment"}
        # What the hook sees is what is saved: the whole tensors.
        assert torch.equal(saved["moment"], whole["state"][0]["exp_avg"])
        optimizer.load_state_dict(saved)
        # As in torch, the caller's dict stays as it is.
        assert saved.keys() == {"whole", "note", "moment"}
        assert optimizer.param_groups[0]["lr"] == 0.5
        called.append(hooks.calls)
    assert called[0] == called[1]
    assert len(called[1]) == 5
    assert_state(engine, before)


def _with(saved: dict[str, Any], **slots: torch.Tensor) -> dict[str, Any]:
    return saved | {"state": saved["state"] | {0: saved["state"][0] | slots}}
