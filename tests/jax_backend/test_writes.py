"""What is written in place, through views and by indices, beside torch on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spmdzero.backend import Mesh
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._graph import Graph
from spmdzero.errors import SpmdZeroRuntimeError

DEVICE = torch.device("xla", 0)
Function = Callable[[torch.Tensor], object]
Put = tuple[tuple[object, ...], torch.Tensor | float]


def mask(*places: int) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.bool)


def at(*places: object) -> torch.Tensor:
    return torch.tensor(places)


def some(*shape: int) -> torch.Tensor:
    return -1 - torch.arange(float(torch.Size(shape).numel())).reshape(shape)


BIG = torch.arange(12.0).reshape(3, 4) > 4  # seven elements
# index of `[3, 4]` or `[3, 4, 3]` -> value. A slice is torch's own view.
PUTS: dict[str, tuple[tuple[int, ...], tuple[object, ...], torch.Tensor | float]] = {
    "rows, one value": ((3, 4), (mask(1, 0, 1),), 7.0),
    "rows, a row": ((3, 4), (mask(1, 0, 1),), some(4)),
    "rows, as many rows": ((3, 4), (mask(1, 0, 1),), some(2, 4)),
    "rows, a row of one": ((3, 4), (mask(1, 0, 1),), some(1, 4)),
    "no row": ((3, 4), (mask(0, 0, 0),), 7.0),
    "no row, no rows": ((3, 4), (mask(0, 0, 0),), some(0, 4)),
    "columns, one value": ((3, 4), (slice(None), mask(1, 0, 1, 1)), 7.0),
    "columns, a column": ((3, 4), (slice(None), mask(1, 0, 1, 1)), some(3, 1)),
    "columns, one of each": ((3, 4), (slice(None), mask(1, 0, 1, 1)), some(3)),
    "columns, all": ((3, 4), (slice(None), mask(1, 0, 1, 1)), some(3, 3)),
    "the last dim": ((3, 4), (..., mask(1, 0, 1, 1)), 7.0),
    "a middle dim": ((3, 4, 3), (slice(None), mask(1, 0, 1, 1)), some(3)),
    "a middle dim, whole": ((3, 4, 3), (slice(None), mask(1, 0, 1, 1)), some(3, 3, 3)),
    "two dims": ((3, 4), (BIG,), 7.0),
    "two dims, each": ((3, 4), (BIG,), some(7)),
    "the first two of three": ((3, 4, 3), (BIG,), some(7, 3)),
    "the last two of three": ((3, 3, 4), (slice(None), BIG), some(7)),
    "beside a number": ((3, 4, 3), (slice(None), mask(1, 0, 1, 1), 0), 7.0),
    "beside a slice": ((3, 4), (mask(1, 0, 1), slice(1, 3)), 7.0),
    "beside another mask": ((3, 4), (mask(1, 0, 1), mask(0, 1, 0, 1)), 7.0),
    "beside another, each": ((3, 4), (mask(1, 0, 1), mask(0, 1, 0, 1)), some(2)),
    "apart from another": ((3, 4, 3), (mask(1, 0, 1), slice(None), mask(0, 1, 1)), some(2, 4)),
    "beside indices": ((3, 4), (mask(1, 0, 1), at(1, 3)), some(2)),
    "beside one index": ((3, 4), (mask(1, 0, 1), at(1)), some(2)),
    "one row beside indices": ((3, 4), (mask(0, 1, 0), at(1, 3)), some(2)),
    "beside indices of two dims": ((3, 4), (at([0, 1], [2, 0]), mask(0, 1, 1, 0)), some(2, 2)),
    "indices": ((3, 4), (at(0, -1),), some(2, 4)),
    "indices of columns": ((3, 4), (slice(None), at(0, -1)), some(3, 2)),
    "indices apart": ((3, 4, 3), (at(0, 2), slice(None), at(1, 0)), some(2, 4)),
    "a slice with steps": ((3, 4), (slice(None), slice(0, None, 2)), some(3, 2)),
    "a new dim": ((3, 4), (None, 1), 7.0),
    "a mask of no dims": ((3, 4), (torch.tensor(True),), 7.0),
}


def moved(given: object) -> object:
    return given.to(DEVICE) if isinstance(given, torch.Tensor) else given


@pytest.mark.parametrize("name", PUTS)
def test_what_is_written_by_masks_and_indices_is_torchs(mesh: Mesh, name: str) -> None:
    shape, index, value = PUTS[name]
    plain = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    ours = plain.to(DEVICE)
    plain[index] = value
    ours[tuple(map(moved, index))] = moved(value)
    assert torch.equal(ours.cpu(), plain)


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


def of_a_copy(function: Callable[[torch.Tensor], object]) -> Function:
    """What `function` makes of a copy, and the copy."""

    def both(x: torch.Tensor) -> object:
        x = x.clone()
        return function(x), x

    return both


def complex_of(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x + 1)


# name -> what it makes of `[1, 4, 6]` numbers.
IN_PLACE: dict[str, Function] = {
    "squeeze_": of_a_copy(lambda x: x.squeeze_(0).mul_(2)),
    "unsqueeze_": of_a_copy(lambda x: x.unsqueeze_(1).add_(1)),
    "transpose_": of_a_copy(lambda x: x.transpose_(1, 2)[0, 1].zero_()),
    "t_": of_a_copy(lambda x: x[0].t_().mul_(x[0].t())),
    "swapaxes_": of_a_copy(lambda x: x.swapaxes_(0, 1)),
    "as_strided_": of_a_copy(lambda x: x.as_strided_((2, 3), (6, 1), 1).mul_(-1)),
    "resize_": of_a_copy(lambda x: x.resize_(2, 5)),
    "set_": of_a_copy(lambda x: torch.zeros(3, device=x.device).set_(x)),
    "set_ is an alias": of_a_copy(lambda x: torch.zeros(3, device=x.device).set_(x).add_(1)),
    "data with strides": of_a_copy(lambda x: setattr(x, "data", (x + 1).reshape(1, 6, 4).mT)),
    "data of a view": of_a_copy(lambda x: setattr(x[0, 0], "data", x[0, 1])),
    "<<=": of_a_copy(lambda x: x.long().__ilshift__(2)),
    ">>=": of_a_copy(lambda x: x.long().__irshift__(1)),
    "unfold": of_a_copy(lambda x: x.unfold(2, 2, 3).zero_()),
    "expand that adds a dim": of_a_copy(lambda x: x.expand(1, 1, 4, 6).add_(1)),
    "diagonal": of_a_copy(lambda x: x[0].diagonal(1).fill_(-1)),
    "conj": lambda x: (x := complex_of(x), x.conj().mul_(2j))[0],
    "conj, resolved": lambda x: (x := complex_of(x), x.conj().resolve_conj().add_(1)),
    "conj of a part": lambda x: (x := complex_of(x), x[0, 1:].conj()[1].mul_(2j))[0],
    "imag": lambda x: (x := complex_of(x), x.imag.zero_(), x.conj().imag.add_(3))[0],
    "view_as_complex": of_a_copy(lambda x: torch.view_as_complex(x.view(-1, 2)).mul_(1j)),
    "view(dtype)": of_a_copy(lambda x: x.view(torch.int32).add_(1)),
    "out= an empty one": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "out= a part": of_a_copy(lambda x: torch.add(x[0, 0], 1, out=x[0, 1])),
    "out= of another dtype": lambda x: torch.add(
        x, x, out=torch.empty(1, 4, 6, dtype=torch.float64, device=x.device)
    ),
    "two outs": lambda x: torch.max(
        x, 2, out=(torch.empty(0, device=x.device), torch.empty(0, device=x.device).long())
    ),
    "dropout of nothing": of_a_copy(lambda x: torch.native_dropout(x, 0.5, False)[0].add_(1)),
    "foreach": of_a_copy(lambda x: torch._foreach_mul_([x[0, 0], x[0, 1]], 2.0)),
}


def on_the_cpu(made: object) -> object:
    if isinstance(made, torch.Tensor):
        return made.detach().cpu().resolve_conj()
    return [on_the_cpu(item) for item in made] if isinstance(made, list | tuple) else made


def form(made: object) -> object:
    if isinstance(made, torch.Tensor):
        return made.shape, made.stride(), made.dtype
    return [form(item) for item in made] if isinstance(made, list | tuple) else made


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_torchs(mesh: Mesh, name: str) -> None:
    plain = torch.arange(24.0).reshape(1, 4, 6)
    theirs, ours = IN_PLACE[name](plain), IN_PLACE[name](plain.to(DEVICE))
    torch.testing.assert_close(on_the_cpu(ours), on_the_cpu(theirs), rtol=0, atol=0)
    assert form(ours) == form(theirs)


def whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


# What torch refuses, of integers unless it says otherwise.
REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "int += float": lambda x: x.add_(1.5),
    "int /= int": lambda x: x.div_(2),
    "int *= a tensor of floats": lambda x: x.mul_(torch.full((), 1.5, device=x.device)),
    "int clamped by a float": lambda x: x.clamp_(min=1.5),
    "bool += int": lambda x: (x > 0).add_(1),
    "a larger operand": lambda x: x.add_(x.expand(2, 4)),
    "out= of integers": lambda x: torch.mul(x, 1.5, out=torch.empty_like(x)),
    "a list of them": lambda x: torch._foreach_add_([x], 1.5),
    "expanded": lambda x: x.expand(2, 4).add_(1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_to_write_is_refused(mesh: Mesh, name: str) -> None:
    plain = whole(1, 2, 3, 4)
    with pytest.raises(RuntimeError):
        REFUSED[name](plain)
    ours = plain.to(DEVICE)
    with pytest.raises((RuntimeError, SpmdZeroRuntimeError)) as caught:
        REFUSED[name](ours)
    assert "please report" not in str(caught.value)
    assert torch.equal(ours.cpu(), whole(1, 2, 3, 4))


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


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (function(x * 1) ** 2).sum().backward()
    assert x.grad is not None
    return x.grad


def after(written: Callable[[torch.Tensor], object], x: torch.Tensor) -> torch.Tensor:
    written(x)
    return x


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns that a mask selects": lambda x: after(
        lambda x: x.__setitem__((slice(None), mask(1, 0, 1, 1).to(x.device)), 0.5), x
    ),
    "rows that a mask selects": lambda x: after(
        lambda x: x.__setitem__(mask(1, 0, 1).to(x.device), 0.5), x
    ),
    "a value where a mask holds": lambda x: after(
        lambda x: x.__setitem__(x.detach() > 5, x[0, 0]), x.clone()
    ),
    "a row where a mask holds": lambda x: after(
        lambda y: y.__setitem__(mask(1, 0, 1).to(x.device), x[1] * 3), x.clone()
    ),
    "a stale view of a list's tensor": lambda x: (x[:, 1::2], torch._foreach_mul_([x], 0.5))[0],
    "a base of a list's view": lambda x: after(lambda x: torch._foreach_mul_([x[:, 1::2]], 0.5), x),
    "a base and its view": lambda x: after(
        lambda x: torch._foreach_mul_([x, x[:, 1::2]], 0.5), x
    ),
    "squeezed in place": lambda x: (x[None] * 1).squeeze_(0).t_().mul_(2)[1],
    "as real parts": lambda x: after(
        lambda z: torch.view_as_real(z).mul_(2), complex_of(x) * 1
    ).abs(),
    "a row, then turned and turned back": lambda x: after(
        lambda y: (y[0], y.t_().t_())[0].mul_(2), x * 1
    ),
    "turned, then a row": lambda x: after(lambda y: y.t_()[0].mul_(2), x * 1),
    "a part of the storage, then turned": lambda x: after(
        lambda y: (y.as_strided((3,), (2,)), y.t_())[0].mul_(2), x * 1
    ),
    "a row that has no gradient, then turned": lambda x: after(
        lambda y: (y.detach()[0], y.t_()), x * 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_what_was_written_are_torchs(mesh: Mesh, name: str) -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    ours = gradient(GRADIENTS[name], plain.to(DEVICE)).cpu()
    # Sums of up to twelve float32 products in another order.
    torch.testing.assert_close(ours, gradient(GRADIENTS[name], plain), rtol=1e-6, atol=1e-6)


def test_a_saved_tensor_that_a_list_operation_changed_is_noticed(mesh: Mesh) -> None:
    for device in ("cpu", "xla"):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x * 1
        squared = y * y
        torch._foreach_add_([y], 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.sum().backward()


COMPOSITES: dict[str, Callable[[torch.Tensor], object]] = {
    "quantile": lambda x: torch.quantile(x, 0.3),
    "quantiles of rows": lambda x: torch.quantile(
        x.reshape(4, 8), torch.tensor([0.3, 0.5]).to(x.device), dim=1, keepdim=True
    ),
    "nanquantile": lambda x: torch.nanquantile(x, 0.3),
    "stft": lambda x: torch.stft(
        x, 8, window=torch.ones(8, device=x.device), return_complex=True
    ),
    "istft": lambda x: torch.istft(
        torch.stft(x, 8, window=torch.ones(8, device=x.device), return_complex=True),
        8,
        window=torch.ones(8, device=x.device),
    ),
    "tensor_split by a tensor": lambda x: x.tensor_split(torch.tensor([2, 9])),
    "numpy of what is trained": lambda x: torch.from_numpy(
        x.clone().requires_grad_().numpy(force=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITES)
def test_what_torch_makes_of_others_is_torchs(mesh: Mesh, name: str) -> None:
    plain = torch.arange(32.0)
    ours = on_the_cpu(COMPOSITES[name](plain.to(DEVICE)))
    # A transform of eight numbers up to 32, in float32.
    torch.testing.assert_close(ours, on_the_cpu(COMPOSITES[name](plain)), rtol=1e-5, atol=1e-4)


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
