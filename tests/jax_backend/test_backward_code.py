"""A user's code in a backward pass, a Function's or a hook's: its calls are answered too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from spmdzero.backend import Mesh, arrays

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
    torch.testing.assert_close(grad.cpu(), expected.expand(3))
