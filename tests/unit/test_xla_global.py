"""The forward in global space, where there is no region: torch's numbers, and no gathered batch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_harness import ROWS, Apply, assert_same_sums, numbers, torch_gradients, unplanned
from torch import nn

from spmdzero.backend import Batch
from spmdzero.backend.replica import GlobalForward
from spmdzero.backend.torch_xla import DeviceMesh, global_forward, optimized_hlo
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.state._placed_module import move_module

pytestmark = pytest.mark.backends("torch_xla")

WIDTH = 24


def place(mesh: DeviceMesh, host: torch.Tensor) -> Batch:
    return Batch(mesh.place(host, mesh.batch_spec(host.dim())), 0)


def computing(function: Callable[..., Any], mesh: DeviceMesh) -> GlobalForward:
    """The forward of a module on the devices that computes `function`."""
    module = Apply(function)
    move_module(module, mesh=mesh, dtype=None, source=lambda names: None, plan=unplanned(mesh))
    return global_forward(mesh=mesh, module=module)


def test_a_global_forward_sees_the_whole_batch_and_plain_tensors(mesh: DeviceMesh) -> None:
    x = numbers(ROWS, 4).round()
    forward = computing(lambda x, scale: x - scale * x.max(), mesh)
    output = forward((place(mesh, x),), {"scale": mesh.place(torch.tensor(2.0))})
    assert torch.equal(output.cpu(), x - 2 * x.max())


def test_an_extreme_over_all_dims_is_one_number(mesh: DeviceMesh) -> None:
    x = numbers(ROWS, 4)
    forward = computing(lambda x: (x.amax(), x.amin(keepdim=True)), mesh)
    highest, lowest = forward((place(mesh, x),), {})
    assert torch.equal(highest.cpu(), x.amax())
    assert torch.equal(lowest.cpu(), x.amin(keepdim=True))


def test_a_write_into_windows_is_refused_in_words(mesh: DeviceMesh) -> None:
    # Between windows torch_xla would lose what is there. In the region there are none.
    for write in (
        lambda x: x.unfold(1, 2, 3).zero_(),
        lambda x: x.unfold(1, 2, 2)[0].__setitem__(0, 1.0),
        lambda x: torch._foreach_mul_([x.unfold(1, 2, 2)], 2),
    ):
        with pytest.raises(SpmdZeroRuntimeError, match=r"test_xla_global.py.* Write into a clone"):
            computing(write, mesh)((place(mesh, numbers(ROWS, 4)),), {})


MODELS = {
    "layer norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    "group norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GroupNorm(4, WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
}


@pytest.mark.parametrize("name", MODELS)
def test_norms_equal_torch_over_the_whole_batch(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    module, own = MODELS[name](), MODELS[name]()
    own.load_state_dict(module.state_dict())
    move_module(
        module, mesh=mesh, dtype=torch.float32, source=lambda names: None, plan=unplanned(mesh)
    )
    x, target = numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=1)
    output = global_forward(mesh=mesh, module=module)((place(mesh, x),), {})
    loss = (output - place(mesh, target).tensor).square().mean()
    loss.backward()
    expected = own(x)
    assert_same_sums(output.detach(), expected.detach())
    expected_gradients = torch_gradients(own, (expected - target).square().mean())
    gradients = {n: p.grad for n, p in module.named_parameters()}
    if name == "batch norm":  # which takes the bias before it out again: both are noise
        del gradients["0.bias"], expected_gradients["0.bias"]
    assert_same_sums(gradients, expected_gradients)


@pytest.mark.parametrize("name", MODELS)
def test_what_follows_a_norm_runs_on_each_devices_own_rows(mesh: DeviceMesh, name: str) -> None:
    module = nn.Sequential(MODELS[name](), nn.Linear(WIDTH, 40))
    move_module(
        module, mesh=mesh, dtype=torch.float32, source=lambda names: None, plan=unplanned(mesh)
    )
    output = global_forward(mesh=mesh, module=module)((place(mesh, numbers(ROWS, WIDTH)),), {})
    text = optimized_hlo([output])
    rows = re.findall(r"f32\[(\d+),40\]\S* (?:dot|fusion|custom-call)\(", text)
    assert rows
    assert set(rows) == {str(ROWS // mesh.size)}
