"""What is written in place, through views and by indices: functions to compare with torch's."""

from collections.abc import Callable

import torch

Function = Callable[[torch.Tensor], object]


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


def on_the_cpu(made: object) -> object:
    """A tensor, or each of a list, as it is on the CPU."""
    if isinstance(made, torch.Tensor):
        return made.detach().cpu().resolve_conj()
    return [on_the_cpu(item) for item in made] if isinstance(made, list | tuple) else made
