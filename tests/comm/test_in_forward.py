"""Collectives of torch.distributed in a forward: devices hand each other rows, as ranks do."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.backend.replica import _group_methods
from tests.comm.in_forward import MODELS, WORLD, Asking, gathered
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("jax")
GROUP = dist.ProcessGroup
NAMES = [kind.__name__ for kind in MODELS]
# fp32 sums of some hundred products, in another order than gloo's.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    # DDP's autograd warns of Barlow Twins' all_reduce, past which its gradient goes.
    return _printed("-m", "tests.comm.in_forward", "ranks", str(store))


@pytest.fixture(scope="module")
def of_devices() -> dict[str, Any]:
    return _printed("-W", "error", "-m", "tests.comm.in_forward", "devices", devices=WORLD)


def _printed(*arguments: str, **how: Any) -> dict[str, Any]:
    return json.loads(run_python(*arguments, **how).splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_ranks(
    name: str, of_ranks: dict[str, Any], of_devices: dict[str, Any]
) -> None:
    for (loss, gradients), (expected, theirs) in zip(of_devices[name], of_ranks[name], strict=True):
        np.testing.assert_allclose(loss, expected, **CLOSE)
        for own, their in zip(gradients, theirs, strict=True):
            np.testing.assert_allclose(own, their, **CLOSE)


def branching(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if dist.get_rank() == 0 else x


def read_from_a_list(x: torch.Tensor) -> torch.Tensor:
    return gathered(x)[dist.get_rank()]


def own_place_of_the_host(x: torch.Tensor) -> torch.Tensor:
    places = gathered(x)
    places[0] = x
    return torch.cat(places)


def list_of_hosts(x: torch.Tensor) -> torch.Tensor:
    dist.all_gather([torch.zeros_like(x)], x)
    return x


def sending(x: torch.Tensor) -> torch.Tensor:
    dist.reduce(x, dst=0)
    return x


def exchanging(x: torch.Tensor) -> torch.Tensor:
    dist.all_to_all_single(torch.zeros_like(x), x.detach())
    return x


REFUSED = {
    branching: "can't have Python branch on it",
    read_from_a_list: r"Use torch.stack\(list\)\[rank\]",
    own_place_of_the_host: "every device puts its own rows in place 0",
    list_of_hosts: "given a list with 1 places, and 8 devices",
    sending: "none of them can send or receive alone",
    exchanging: "none of them can send or receive alone",
}


def engine_of(ask: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    return spmdzero.initialize(model=Asking(ask, 4), config=config)[0]


@pytest.mark.parametrize("ask", REFUSED, ids=lambda ask: ask.__name__)
def test_what_one_program_cannot_do_is_refused_with_its_line(
    ask: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(spmdzero.ReplicaRegionError, match=REFUSED[ask]) as refused:
        engine_of(ask)(torch.randn(8, 4))
    assert "test_in_forward.py:" in str(refused.value) or "in_forward.py:" in str(refused.value)
    # torch is as it was: outside of a forward the hosts are the ranks.
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


def test_each_method_of_torchs_group_that_starts_work_is_answered_or_refused() -> None:
    methods = {name: getattr(GROUP, name).__doc__ or "" for name in dir(GROUP)}
    working = {name for name, said in methods.items() if re.search(r"-> c10d[.:]+Work", said)}
    # Those of torch's own tools.
    left = {"_end_coalescing", "reconfigure"}
    assert working - left <= {*_group_methods._ANSWERS, *_group_methods._REFUSED}


def test_deepspeeds_names_mean_the_devices_too() -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().clone()
        spmdzero.comm.all_reduce(mean, op=spmdzero.comm.ReduceOp.AVG)
        part = torch.zeros_like(mean)
        spmdzero.comm.reduce_scatter_tensor(part, torch.cat(gathered(x.detach())))
        return mean.sum() + part.sum() / spmdzero.comm.get_world_size() + 0 * x.sum()

    engine, x = engine_of(ask), torch.randn(8, 4)
    rows = torch.nn.functional.linear(x, *(p.detach().cpu() for p in engine.module.parameters()))
    torch.testing.assert_close(engine(x).cpu(), 2 * rows.sum() / 8)


def test_the_audit_names_a_world_size_of_hosts() -> None:
    report = spmdzero.audit(engine_of(lambda x: x), [torch.randn(8, 4)])
    (found,) = [f for f in report.findings if f.name == "world-size-of-hosts"]
    assert "'world_size'" in found.subject


def test_a_gather_outside_of_the_forward_has_the_hosts_gradient() -> None:
    # A checkpoint's forward runs again in the backward, which is inside of the forward then.
    engine = engine_of(lambda x: checkpoint(torch.sin, x * 0, use_reentrant=False) + x)
    loss = engine(torch.randn(8, 4))
    (gathered_loss,) = torch.distributed.nn.functional.all_gather(loss)
    total = torch.distributed.nn.functional.all_reduce(gathered_loss * 3)
    # One host: the backward of both leaves the gradient as it is, though it runs with the model's.
    engine.backward(total)
    layer = engine.module.layer.bias
    torch.testing.assert_close(layer.grad.cpu(), torch.full((4,), 3.0))
