"""What a forward writes is kept, in whatever way it is written, as in plain torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spmdzero.utils import safe_get_full_fp32_param
from torch import nn

import spmdzero
from spmdzero.backend import Mesh, runtime
from spmdzero.backend.pure import ModuleWatch
from tests.support.engines import one_call, replays, start, three_calls

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

SIZE, STEPS, LR = 6, 5, 0.25
ROWS = torch.randn(STEPS, 2, 8, SIZE, generator=torch.Generator().manual_seed(1))


def _assigned_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = _averaged(tensor, value)


def _indexed(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor[:] = _averaged(tensor, value)


def _averaged(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return tensor.detach() * 0.5 + value * 0.5


# Each makes the tensor the mean of itself and of a value.
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "in_place": lambda t, v: t.mul_(0.5).add_(v, alpha=0.5),
    "copy": lambda t, v: t.copy_(_averaged(t, v)),
    "data": _assigned_data,
    "data_copy": lambda t, v: t.data.copy_(_averaged(t, v)),
    "data_in_place": lambda t, v: t.data.mul_(0.5).add_(v, alpha=0.5),
    "detached": lambda t, v: t.detach().lerp_(v, 0.5),
    "out": lambda t, v: torch.lerp(t, v, 0.5, out=t),
    "view": lambda t, v: t.view(2, 3).lerp_(v.view(2, 3), 0.5),
    "half": lambda t, v: [half.lerp_(w, 0.5) for half, w in zip(t.chunk(2), v.chunk(2))],  # noqa: B905
    "indexed": _indexed,
    "set": lambda t, v: t.set_(_averaged(t, v)),
    "foreach": lambda t, v: torch._foreach_lerp_([t], [v], 0.5),
    "foreach_copy": lambda t, v: torch._foreach_copy_([t], [_averaged(t, v)]),
    "twice": lambda t, v: t.lerp_(v, 0.25).lerp_(v, 1 / 3),
}
KINDS = "buffer", "trained", "frozen"


class Writing(nn.Module):
    """Writes a buffer, a trained and a frozen parameter in each way, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)
        for way in WAYS:
            self.register_buffer(f"buffer_{way}", torch.zeros(SIZE))
            self.register_parameter(f"trained_{way}", nn.Parameter(torch.zeros(SIZE)))
            frozen = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
            self.register_parameter(f"frozen_{way}", frozen)
        self.register_buffer("buffer_assigned", torch.zeros(SIZE))
        self.calls = nn.Parameter(torch.zeros((), dtype=torch.int32), requires_grad=False)
        self.register_buffer("slope", torch.linspace(-1, 1, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x)
        with torch.no_grad():
            value = x.mean(0).to(self.slope.dtype)
            for kind in KINDS:
                for way, write in WAYS.items():
                    write(getattr(self, f"{kind}_{way}"), value)
            self.buffer_assigned = _averaged(self.buffer_assigned, value)
            self.calls.add_(1)
        # The loss is linear in what is written, so that the mean of the replicas' is that of all.
        used = [getattr(self, f"{kind}_{way}") for kind in KINDS for way in WAYS]
        return y.square().mean() + (torch.stack(used) @ self.slope).sum()


@pytest.fixture(scope="module")
def initial() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Writing().state_dict()


def _model(initial: dict[str, torch.Tensor]) -> Writing:
    model = Writing()
    model.load_state_dict(initial)
    return model


def _torchs(initial: dict[str, torch.Tensor], *, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """What plain torch makes of it in one process."""
    model = _model(initial)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for rows in ROWS:
        for micro in rows[:accumulation]:
            (model(micro) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _engine(initial: dict[str, torch.Tensor], **more: Any) -> spmdzero.Engine:
    more.setdefault("zero_optimization", {"stage": 1})
    return start(
        _model(initial),
        optimizer={"type": "SGD", "params": {"lr": LR}},
        zero_allow_untested_optimizer=True,
        gradient_clipping=0.0,
        **more,
    )


def _train(engine: spmdzero.Engine, run: Any) -> dict[str, torch.Tensor]:
    for rows in ROWS:
        run(engine, *rows[: engine.gradient_accumulation_steps()])
    return {name: tensor.cpu() for name, tensor in engine.module.state_dict().items()}


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    wrong = [
        name
        for name, tensor in expected.items()
        # Values are about 1, of some ten fp32 operations each; a lost write is off by 0.1.
        if not torch.allclose(found[name].to(tensor.dtype), tensor, rtol=0, atol=2e-6)
    ]
    assert not wrong


TRACED, GLOBAL = {"capture": False}, {"forward": "global"}
STYLES = {"three calls": three_calls, "train_batch": one_call}


@pytest.mark.parametrize("style", STYLES)
def test_every_write_of_a_replica_is_kept(initial: dict[str, torch.Tensor], style: str) -> None:
    engine = _engine(initial)
    _assert_same(_train(engine, STYLES[style]), _torchs(initial))
    assert replays(engine)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("spmd", [{}, TRACED, GLOBAL, TRACED | GLOBAL], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_every_write_is_kept_in_every_way_to_train(
    initial: dict[str, torch.Tensor],
    style: str,
    spmd: dict[str, Any],
    stage: int,
    accumulation: int,
) -> None:
    engine = _engine(
        initial,
        spmd=spmd,
        zero_optimization={"stage": stage},
        gradient_accumulation_steps=accumulation,
    )
    found = _train(engine, STYLES[style])
    _assert_same(found, _torchs(initial, accumulation=accumulation))


class FromBefore(nn.Module):
    """Writes a trained, a frozen parameter and a buffer by a list that it made of them at first."""

    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self.line, self.read = nn.Linear(SIZE, SIZE), read
        self.own: list[tuple[str, torch.Tensor]] = []
        for way in WAYS:
            trained, frozen = (
                nn.Parameter(torch.zeros(SIZE), requires_grad=g) for g in (True, False)
            )
            self.register_parameter(f"trained_{way}", trained)
            self.register_parameter(f"frozen_{way}", frozen)
            self.register_buffer(f"buffer_{way}", buffer := torch.zeros(SIZE))
            self.own += [(way, trained), (way, frozen), (way, buffer)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x)
        with torch.no_grad():
            for way, tensor in self.own:
                WAYS[way](tensor, x.mean(0))
        if self.read:
            y.sum().item()
        return y.square().mean() + torch.stack([tensor for _, tensor in self.own]).mean()


@pytest.mark.parametrize("read", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_global_forward_writes_once_by_a_reference_from_before(read: bool) -> None:
    torch.manual_seed(0)
    model = FromBefore(read=read)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR)
    engine = start(
        model,
        optimizer={"type": "SGD", "params": {"lr": LR}},
        zero_allow_untested_optimizer=True,
        gradient_clipping=0.0,
        spmd=GLOBAL,
    )
    for rows in ROWS[:, 0]:
        optimizer.zero_grad()
        plain(rows).backward()
        optimizer.step()
        one_call(engine, rows)
    found = {name: tensor.cpu() for name, tensor in engine.module.state_dict().items()}
    _assert_same(found, plain.state_dict())
    expected = "reads a value" if read else "writes 'trained_in_place' by a reference"
    assert expected in engine.capture.reason


class Clamped(nn.Module):
    """Keeps its weights between -1 and 1, as WGAN's critic does; the gradient of each is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 0.25, 2.0, -2.0]))
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
            self.calls.data += 1
        return (self.weight * x).sum(1).mean().float()


ONES = torch.ones(8, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("run", "spmd"),
    [
        (three_calls, {}),
        (one_call, {}),
        pytest.param(three_calls, TRACED, marks=pytest.mark.slow),
        pytest.param(three_calls, GLOBAL, marks=pytest.mark.slow),
        pytest.param(one_call, GLOBAL, marks=pytest.mark.slow),
    ],
)
def test_a_master_follows_what_is_written_and_keeps_the_digits_of_the_rest(
    run: Any, spmd: dict[str, Any]
) -> None:
    engine = start(
        Clamped(),
        bf16={"enabled": True},
        optimizer={"type": "SGD", "params": {"lr": 1e-4}},
        zero_optimization={"stage": 1},
        zero_allow_untested_optimizer=True,
        gradient_clipping=0.0,
        spmd=spmd | {"min_shard_elements": 0},
    )
    for _ in range(5):
        run(engine, ONES)
    master = safe_get_full_fp32_param(engine.module.weight)
    # Five steps of 1e-4 are less than half of a bf16 step, so that bf16 shows none of them.
    expected = torch.tensor([0.5, 0.25, 1.0, -1.0]) - 5e-4
    torch.testing.assert_close(master.cpu(), expected, rtol=0, atol=3e-7)
    assert engine.module.calls.item() == 5


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_step_that_is_skipped_keeps_what_its_forward_wrote(style: str) -> None:
    engine = start(Clamped(), fp16={"enabled": True, "initial_scale_power": 16})
    for _ in range(5):
        STYLES[style](engine, torch.full((8, 4), torch.inf, dtype=torch.float16))
    assert engine.skipped_steps == 5
    assert engine.module.calls.item() == 5
    assert engine.module.weight.tolist() == [0.5, 0.25, 1.0, -1.0]
    master = safe_get_full_fp32_param(engine.module.weight)
    assert master.tolist() == [0.5, 0.25, 1.0, -1.0]


# Ways into what `.data` gave of a tensor before.
BY_DATA: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy": lambda t, v: t.copy_(v),
    "a part": lambda t, v: t[1:].copy_(v[1:]),
    "in place": lambda t, v: t.mul_(2),
    "foreach": lambda t, v: torch._foreach_mul_([t], 2),
    "foreach_copy": lambda t, v: torch._foreach_copy_([t], [v]),
}


@pytest.mark.parametrize("way", BY_DATA)
def test_a_write_into_a_tensor_that_a_module_keeps_is_seen_and_undone(mesh: Mesh, way: str) -> None:
    module = nn.Linear(2, 2)
    module.kept = [mesh.place(torch.ones(SIZE))]
    data = module.kept[0].data
    watch = ModuleWatch(module, {})
    runtime.sync()
    assert watch.change() is None
    BY_DATA[way](data, torch.full_like(data, 2))
    assert watch.change() == "0 of 'kept' of the module was written"
    watch.restore()
    assert torch.equal(module.kept[0].cpu(), torch.ones(SIZE))
    assert watch.change() is None


@pytest.mark.parametrize("way", BY_DATA)
def test_masters_follow_what_is_written_through_data_into_gathered_parameters(way: str) -> None:
    engine = start(nn.Sequential(nn.Linear(2, SIZE)), bf16={"enabled": True})
    weight = engine.module[0].weight
    data = weight.data
    with spmdzero.zero.GatheredParameters([weight], modifier_rank=0):
        BY_DATA[way](data, torch.full_like(data, 2))
    master = safe_get_full_fp32_param(weight)
    assert torch.equal(master, weight.detach().cpu().float())
