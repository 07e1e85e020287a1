"""A user's code in a backward pass, a Function's or a hook's: its calls are answered too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from spmdzero.backend import Mesh, arrays
from tests.support.bounds import assert_rounded, assert_summed

Backward = Callable[[torch.Tensor, torch.Tensor], Any]
BACKWARDS: dict[str, Backward] = {
    "loss.backward()": lambda loss, x: loss.backward(),
    "torch.autograd.backward": lambda loss, x: torch.autograd.backward(loss),
    "torch.autograd.grad": lambda loss, x: torch.autograd.grad([loss], x),
    "with a graph": lambda loss, x: torch.autograd.grad(loss, [x], create_graph=True),
}


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        seen.append((grads[0].cpu().device.type, f"{grads[0].sum():.2f}"))
        return grads[0] * 2


seen: list[tuple[str, str]] = []


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_read_there_is_a_read(mesh: Mesh, name: str) -> None:
    seen.clear()
    x = torch.ones(3, device="xla").requires_grad_()
    y = Reads.apply(x)
    assert isinstance(y, torch.Tensor)
    y.register_hook(lambda grad: seen.append((grad.cpu().device.type, f"{grad.sum():.1f}")))
    BACKWARDS[name](y.sum(), x)
    assert seen == [("cpu", "3.0"), ("cpu", "3.00")]


class PassesOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_that_passes_operations_on_changes_no_gradient(mesh: Mesh) -> None:
    def gradient() -> torch.Tensor:
        x = torch.linspace(-1, 2, 8, device="xla").bfloat16().requires_grad_()
        # C++ casts in it, and the gradient goes back by a cast to what C++ takes for the CPU.
        F.rms_norm(x, (8,)).exp().sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    with PassesOn():
        watched = gradient()
    assert watched.device.type == "xla"
    assert torch.equal(watched.cpu(), plain.cpu())


class Sines(TorchFunctionMode):
    """Counts the sines that a function mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.sin
        return func(*args, **(kwargs or {}))


def test_what_is_recomputed_in_the_backward_is_under_the_same_modes(mesh: Mesh) -> None:
    x = torch.ones(3, device="xla").requires_grad_()
    with Sines() as sines:
        y = checkpoint(lambda x: torch.sin(torch.sin(x)), x, use_reentrant=False)
        assert sines.count == 2
        arrays.backward(y.sum())
    assert sines.count == 4
    grad = x.grad
    assert grad is not None
    expected = torch.sin(torch.tensor(1.0)).cos() * torch.tensor(1.0).cos()
    assert_rounded(grad.cpu(), expected.expand(3))


# Their second derivative is a zero that torch doesn't make, and adds to others.
UNMADE = {
    "abs": lambda x: (x.abs() ** 3).sum(),
    "abs_": lambda x: ((x * 1).abs_() ** 2 * x).sum(),
    "l1_loss": lambda x: F.l1_loss(x * x, torch.ones_like(x)),
    "norm": lambda x: (x * x).norm(p=1),
}


@pytest.mark.parametrize("name", UNMADE)
def test_a_zero_that_is_never_made_is_added_as_torch_adds_it(mesh: Mesh, name: str) -> None:
    host = torch.tensor([1.0, -2.0, 3.0])
    found = []
    for x in (host.requires_grad_(), host.detach().to("xla").requires_grad_()):
        (grad,) = torch.autograd.grad(UNMADE[name](x), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x)[0].cpu())
    assert_summed(*found)


WIDE = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grad": torch.func.grad(lambda x: (x**3).sum()),
    "grad of grad": torch.func.grad(lambda x: torch.func.grad(lambda y: (y**3).sum())(x).sum()),
    "jacrev": torch.func.jacrev(lambda x: x.sin() * x.sum()),
    "jacfwd": torch.func.jacfwd(lambda x: x.sin() * x.sum()),
    "jvp": lambda x: torch.func.jvp(torch.exp, (x,), (x.t().reshape(3, 4),))[1],
    "hessian": torch.func.hessian(lambda x: (x**3).sum()),
    "vmap": torch.func.vmap(lambda row: torch.softmax(row @ row.outer(row), -1)),
    "vmap of grad": torch.func.vmap(torch.func.grad(lambda x: x.prod().exp())),
}


# torch scripts its decompositions when the first dual number is made, and warns itself of doing so.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func_computes_what_it_does_on_the_cpu(mesh: Mesh, name: str) -> None:
    found = FUNCTIONS[name](WIDE.to("xla"))
    assert_summed(found.cpu(), FUNCTIONS[name](WIDE))
