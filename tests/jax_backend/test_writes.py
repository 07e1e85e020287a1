"""Writes in place that JAX's backend alone knows, or refuses, beside torch on the CPU."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spmdzero.backend import Mesh
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.lazy._cells import Cell
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.errors import SpmdZeroRuntimeError
from tests.support.writes import BIG, after, at, mask, on_the_cpu, some

DEVICE = torch.device("xla", 0)


def test_what_is_added_by_masks_is_torchs(mesh: Mesh) -> None:
    for index, value in (
        ((mask(1, 0, 1),), some(4)),
        ((mask(1, 0, 1), mask(0, 1, 0, 1)), some(2)),
        ((at(0, 0, 1),), some(3, 4)),
    ):
        plain = torch.ones(3, 4).index_put_(index, value, accumulate=True)
        ours = torch.ones(3, 4, device=DEVICE)
        ours.index_put_(tuple(i.to(DEVICE) for i in index), value.to(DEVICE), accumulate=True)
        assert torch.equal(ours.cpu(), plain)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        ((mask(1, 0, 1),), some(3, 4)),
        ((BIG,), some(6)),
        ((mask(1, 1, 1), mask(0, 1, 0, 1)), torch.tensor(7.0)),
        ((mask(1, 1, 1), at(0, 1)), torch.tensor(7.0)),
    ],
)
def test_of_a_wrong_number_of_values_nothing_is_left(
    mesh: Mesh, index: tuple[torch.Tensor, ...], value: torch.Tensor
) -> None:
    # torch raises. How many a mask selects is known on the devices only.
    with pytest.raises((IndexError, RuntimeError), match="shape mismatch"):
        torch.ones(3, 4).index_put_(index, value)
    on_devices = tuple(i.to(DEVICE) for i in index)
    ours = torch.ones(3, 4, device=DEVICE).index_put_(on_devices, value.to(DEVICE))
    assert ours.isnan().all().item()
    whole = torch.ones(3, 4, device=DEVICE, dtype=torch.int32)
    whole.index_put_(on_devices, value.to(DEVICE, torch.int32))
    assert (whole == torch.iinfo(torch.int32).min).all().item()


def test_what_is_read_outside_is_not_a_number(mesh: Mesh) -> None:
    table = torch.ones(3, 2, device=DEVICE)
    outside = at(0, 3, -1, -100).to(DEVICE)
    read = {
        "embedding": torch.nn.functional.embedding(outside, table)[:, 0],
        "index_select": table.index_select(0, outside)[:, 0],
        "gather": table[:, 0].gather(0, outside),
        "bag": torch.nn.functional.embedding_bag(outside[:, None], table)[:, 0],
    }
    for name, rows in read.items():
        assert rows.isnan().tolist() == [False, True, True, True], name
    # Of these torch counts from the end.
    for counted in (table[outside][:, 0], table[:, 0].take(outside)):
        assert counted.isnan().tolist() == [False, True, False, True]
    target = at(0, 7).to(DEVICE)
    assert torch.nn.functional.cross_entropy(torch.ones(2, 3, device=DEVICE), target).isnan().item()
    ignored = at(0, -100).to(DEVICE)
    loss = torch.nn.functional.cross_entropy(torch.ones(2, 3, device=DEVICE), ignored)
    assert loss.item() == pytest.approx(1.0986, abs=1e-4)


def test_an_out_that_holds_something_is_not_resized(mesh: Mesh) -> None:
    x = torch.ones(3, device=DEVICE)
    with (
        pytest.warns(UserWarning, match="was resized"),
        pytest.raises(RuntimeError, match=r"out= is a tensor of shape \[2, 3\] and .* \[3\]"),
    ):
        torch.add(x, x, out=torch.ones(2, 3, device=DEVICE))


def test_a_trained_view_is_given_no_other_shape_in_place(mesh: Mesh) -> None:
    x = torch.ones(2, 2, device=DEVICE, requires_grad=True)
    with pytest.raises(SpmdZeroRuntimeError, match=r"t_.* gives a view .* Use aten.t.default"):
        (x * 1)[:].t_()


# Of `[3, 3]` numbers: uses of a view that autograd takes for another part of what it views.
STALE: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row written after a turn": lambda x: after(lambda y: (y[0], y.t_())[0].mul_(2), x * 1),
    "a row read after a turn": lambda x: (y := x * 1, y[0], y.t_())[1] * 2,
    "a row of a row": lambda x: (y := x * 1, y[1:], y.t_())[1][0] * 2,
    "a row written after two turns": lambda x: after(
        lambda y: (y[0], y.squeeze_(1).transpose_(0, 1))[0].mul_(2), x[:, None] * 1
    ),
    "a row that a backward starts from": lambda x: (
        (y := x * 1, y[0], y.t_())[1].backward(x.detach()[0])
    ),
    "a row whose gradient is asked for": lambda x: torch.autograd.grad(
        (y := x * 1, y[0], y.t_())[1], x, x.detach()[0]
    ),
    "a row of zeros that gets what is trained": lambda x: after(
        lambda y: (y[0], y.t_())[0].copy_(x[0]), torch.zeros(3, 3, device=x.device)
    ),
    "a part that is turned and gets what is trained": lambda x: after(
        lambda y: y[:2, :2].t_().copy_(x[:2, :2]), torch.zeros(3, 3, device=x.device)
    ),
    "a part that is given the place of another": lambda x: after(
        lambda y: after(lambda row: setattr(row, "data", y[1]), y[0]).copy_(x[0]),
        torch.zeros(3, 3, device=x.device),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STALE)
def test_a_view_older_than_a_change_of_shape_has_no_gradient(mesh: Mesh, name: str) -> None:
    x = torch.arange(9.0).reshape(3, 3).to(DEVICE).requires_grad_()
    with pytest.raises(SpmdZeroRuntimeError, match=r"test_writes.py.*in place.*view again"):
        STALE[name](x)
    if "backward" not in name and "gradient" not in name:
        with torch.no_grad():
            # Its numbers are torch's.
            torch.testing.assert_close(STALE[name](x).cpu(), STALE[name](x.cpu()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["lstm", "weight_norm"])
def test_layers_with_kernels_of_the_cpus_own_are_torchs(mesh: Mesh, kind: str) -> None:
    torch.manual_seed(0)
    if kind == "lstm":
        layer = torch.nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
    else:
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4), dim=1)
    x, made = torch.randn(2, 5, 3), []
    for device in ("cpu", "xla"):
        layer = layer.to(device)
        layer.zero_grad()
        out = layer(x.to(device))
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        made.append([out, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(on_the_cpu(made[1]), on_the_cpu(made[0]), rtol=1e-5, atol=1e-5)


def test_another_default_dtype_is_another_program(mesh: Mesh) -> None:
    one = torch.arange(1, 4, device=DEVICE)
    first = (one / 3).cpu()
    torch.set_default_dtype(torch.float64)
    try:
        # Recorded under this default dtype and lowered under the other one.
        second, read = one / 3, (one / 3 + 1).cpu()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first, torch.arange(1, 4) / 3)
    exact = torch.arange(1, 4).double() / 3
    assert torch.equal(second.cpu(), exact)
    assert torch.equal(read, exact + 1)
    assert torch.equal((one / 3).cpu(), first)


def test_another_default_dtype_is_another_program_to_later_processes(mesh: Mesh) -> None:
    def key() -> bytes:
        made = torch.full((2,), 1 / 3, device=DEVICE).clone()
        return Graph.of([value_of(made)])[0].key

    first = key()
    torch.set_default_dtype(torch.float64)
    try:
        assert key() != first
    finally:
        torch.set_default_dtype(torch.float32)
    assert key() == first


def test_a_cell_that_was_never_filled_goes_without_noise() -> None:
    # torch's compiler makes such objects, and Python prints what is raised when one goes.
    Cell.__new__(Cell)
    gc.collect()
