"""Steps of models whose forward calls torch.distributed, beside torch on the whole batch."""

import functools
import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import spmdzero
from tests.comm.in_forward import Asking
from tests.comm.newest_names import functional_gather
from tests.comm.trained_in_forward import MICRO, WIDTH, Towers, batches, by_engine, by_torch
from tests.support.rows import marks_of

pytestmark = pytest.mark.backends("jax")
DEVICES = 8
# Five steps of fp32 sums in another order; bf16 has 8 bits of each number.
CLOSE, CLOSE_BF16 = {"rtol": 2e-4, "atol": 2e-5}, {"rtol": 0.05, "atol": 0.03}
EVERY = {"stage3_param_persistence_threshold": 0}


def stage(number: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **(EVERY if number == 3 else {})}}


QUICK = {
    "train_batch, stage 2": ("train_batch", 1, stage(2)),
    "plain": ("plain", 1, stage(0)),
}
ALL = {
    **{f"train_batch, stage {n}": ("train_batch", 1, stage(n)) for n in (0, 1, 3)},
    **{f"calls, stage {n}": ("calls", 1, stage(n)) for n in range(4)},
    "plain, stage 3": ("plain", 1, stage(3)),
    "accumulation": ("train_batch", 2, stage(2)),
    "accumulation by calls": ("calls", 2, stage(0)),
    "bf16": ("train_batch", 1, {"bf16": {"enabled": True}, **stage(2)}),
    "bf16 by calls, stage 3": ("calls", 1, {"bf16": {"enabled": True}, **stage(3)}),
    "recompute": ("train_batch", 1, {"spmd": {"recompute": "everything"}}),
    "recompute by calls": ("calls", 1, {"spmd": {"recompute": "everything"}, **stage(3)}),
    "dots": ("train_batch", 1, {"spmd": {"recompute": "dots"}}),
    "scan": ("train_batch", 1, {"spmd": {"scan": "on"}, **stage(3)}),
    "scan, recompute": ("train_batch", 1, {"spmd": {"scan": "on", "recompute": "everything"}}),
    "two axes": ("train_batch", 1, {"spmd": {"mesh": {"data": 2, "fsdp": 4}}, **stage(3)}),
    "global": ("calls", 1, {"spmd": {"forward": "global"}}),
    "global train_batch": ("train_batch", 1, {"spmd": {"forward": "global"}}),
}
ROWS = [
    pytest.param(name, marks=marks_of(config.get("spmd", {}), slow=name in ALL))
    for name, (*_, config) in (QUICK | ALL).items()
]
of_torch = functools.cache(by_torch)


def assert_as_torch(
    way: str, accumulation: int, config: dict[str, Any], *, model: Towers, norm: bool = False
) -> None:
    close: dict[str, Any] = CLOSE_BF16 if "bf16" in config else CLOSE
    losses, state = by_engine(DEVICES, way, accumulation, model=model, config=config)
    expected, theirs = of_torch(DEVICES, accumulation, norm=norm)
    np.testing.assert_allclose(losses, expected, **close)
    for name, value in theirs.items():
        if "bf16" in config and name.startswith("blocks") and name.endswith("bias"):
            # The mean takes it away, so its gradient is nothing but rounding.
            continue
        np.testing.assert_allclose(state[name].float(), value, err_msg=name, **close)


@pytest.mark.parametrize("name", ROWS)
def test_steps_are_those_of_torch_on_the_whole_batch(name: str) -> None:
    assert_as_torch(*(QUICK | ALL)[name], model=Towers(whole=False))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["train_batch", "calls", "plain"])
@pytest.mark.parametrize("kind", ["reentrant", "other"])
def test_a_checkpoint_around_the_gather(kind: str, way: str) -> None:
    assert_as_torch(way, 1, stage(2), model=Towers(whole=False, checkpointed=kind))


@pytest.mark.parametrize(
    "config",
    [
        stage(2),
        pytest.param(stage(3), marks=pytest.mark.slow),
        pytest.param({"spmd": {"forward": "global"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sync_batch_norm_has_the_statistics_of_all_rows(config: dict[str, Any]) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Towers(whole=False, norm=True))
    assert_as_torch("train_batch", 1, config, model=model, norm=True)


@pytest.mark.parametrize("forward", ["checkpointed", "reading"])
def test_a_plain_backward_that_runs_python_is_refused(forward: str) -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        largest = x.detach().abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return x / largest.item()

    model = (
        Towers(whole=False, checkpointed="other")
        if forward == "checkpointed"
        else Asking(ask, WIDTH)
    )
    # A folded forward has all that its backward runs again.
    traced = {"spmd": {"capture": False}} if forward == "checkpointed" else {}
    engine = engine_of(model, **traced)
    given = batches(DEVICES, 1)[0]
    loss = engine(*given) if forward == "checkpointed" else engine(given[0])
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"Call engine\.backward\(loss\)"):
        loss.backward()


def engine_of(model: nn.Module, **config: Any) -> Any:
    whole = {"train_micro_batch_size_per_gpu": MICRO, "optimizer": {"type": "AdamW"}, **config}
    return spmdzero.initialize(model=model, config=whole)[0]


def functional(x: torch.Tensor) -> torch.Tensor:
    return functional_gather(x, 0, dist.group.WORLD)


def by_ranks(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(x, "sum", [0])


def made_mesh(x: torch.Tensor) -> torch.Tensor:
    dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return x


REFUSED = {functional: "a functional collective", by_ranks: "a functional", made_mesh: "DeviceMesh"}


@pytest.mark.parametrize("ask", REFUSED, ids=lambda ask: ask.__name__)
def test_groups_of_hosts_are_refused_with_the_line(ask: Any) -> None:
    with pytest.raises(spmdzero.ReplicaRegionError, match=REFUSED[ask]) as refused:
        engine_of(Asking(ask, WIDTH))(torch.randn(DEVICES * MICRO, WIDTH))
    assert "test_trained_in_forward.py:" in str(refused.value)


def test_a_dtensor_over_hosts_is_refused_with_the_line() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    spmdzero.init_distributed()
    mesh = dist.init_device_mesh("cpu", (1,))

    def ask(x: torch.Tensor) -> torch.Tensor:
        # Over a group of one host this would leave each device its own rows.
        return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()

    with pytest.raises(spmdzero.ReplicaRegionError, match="a DTensor in a forward") as refused:
        engine_of(Asking(ask, WIDTH))(torch.randn(DEVICES * MICRO, WIDTH))
    assert "test_trained_in_forward.py:" in str(refused.value)


@pytest.mark.parametrize("axis", ["sequence", "tensor"])
def test_a_mesh_whose_devices_share_rows_is_refused(axis: str) -> None:
    mesh = {"mesh": {"fsdp": -1, axis: 2}}
    if axis == "tensor":
        mesh["partition"] = {"layer.weight": "column"}
    engine = engine_of(Asking(lambda x: dist.nn.all_reduce(x), WIDTH), spmd=mesh)
    x = torch.randn(DEVICES // 2 * MICRO, WIDTH)
    with pytest.raises(spmdzero.ReplicaRegionError, match=f'a mesh with "{axis}": 2'):
        engine(x)
    # What it had begun is in the error's traceback, and is of a mesh that the next engine hasn't.
    del engine
    gc.collect()


def test_the_audit_finds_nothing_stray_in_the_gathers() -> None:
    report = spmdzero.audit(engine_of(Towers(whole=False), **stage(2)), batches(DEVICES, 1))
    assert not [found for found in report.findings if "activation" in found.name]
