"""Heads in programs for TPUs: halves that rotary embeddings turn, heads before positions."""

import importlib.util
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from spmdzero.backend import Mesh, tracing_only
from spmdzero.backend.jax.axes._turned_halves import turned, with_turned_halves
from spmdzero.backend.jax.graph import _graph_function
from spmdzero.backend.jax.graph._graph import Slot, Step
from spmdzero.backend.jax.graph._operations import MeshOp
from spmdzero.backend.jax.lazy._values import Space
from spmdzero.backend.jax.ops.views import transpose
from tests.jax_backend.for_tpus import cycles_on_v5e, step_for_tpus
from tests.support.engines import start

DEVICE = torch.device("xla", 0)
HEADS, SIZE, LENGTH = 2, 128, 256
HALF, WIDTH = SIZE // 2, HEADS * SIZE
Turn = Callable[[torch.Tensor], torch.Tensor]


def sliced(x: torch.Tensor) -> torch.Tensor:
    """As transformers has it."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def chunked(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def turned_back(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], -x[..., :half]), dim=x.ndim - 1)


LIKE: dict[str, Turn] = {"sliced": sliced, "chunked": chunked, "turned back": turned_back}
# What looks alike and isn't.
UNLIKE: dict[str, Turn] = {
    "halves in their places": lambda x: torch.cat((-x[..., :HALF], x[..., HALF:]), -1),
    "one half twice": lambda x: torch.cat((-x[..., HALF:], x[..., HALF:]), -1),
    "halves of two tensors": lambda x: torch.cat((-x[..., HALF:], (2 * x)[..., :HALF]), -1),
    "a quarter": lambda x: torch.cat((x[..., -32:], x[..., :96]), -1),
    "every second column": lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), -1),
    "along rows": lambda x: torch.cat((-x[..., 8:, :], x[..., :8, :]), -2),
    "rows joined": lambda x: torch.cat((-x[..., HALF:], x[..., :HALF]), -2),
    "halves summed": lambda x: x[..., HALF:] + x[..., :HALF],
    "one half": lambda x: x[..., :HALF] * 2,
    "no sign changed": lambda x: torch.cat((x[..., HALF:], x[..., :HALF]), -1),
}


def result_and_gradient(turn: Turn, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    made = turn(x) * 3
    (made * made.detach().cos()).sum().backward()
    assert x.grad is not None
    return made.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("turn", [*LIKE.values(), *UNLIKE.values()], ids=[*LIKE, *UNLIKE])
def test_results_and_gradients_are_torchs(mesh: Mesh, turn: Turn) -> None:
    x = torch.randn(2, 3, 16, SIZE, generator=torch.Generator().manual_seed(0))
    made, grad = result_and_gradient(turn, x.to(DEVICE))
    expected, expected_grad = result_and_gradient(turn, x)
    assert torch.equal(made, expected)
    # The cosine's last bit.
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_what_is_made_of_nothing_is_no_half() -> None:
    def made(number: int, key: str, *args: object) -> Step:
        slot = Slot(number, (2, 4 * number), torch.float32, Space.GLOBAL)
        return Step(MeshOp(key), args, {}, (slot,), Space.GLOBAL, (), None)

    first = made(1, "made of nothing")
    (part,) = first.made
    steps = [first, made(2, "aten.cat.default", [part, part], -1)]
    assert with_turned_halves(steps) == steps


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1)])
def test_the_product_for_tpus_is_exact(signs: tuple[int, int]) -> None:
    x = jnp.asarray(torch.randn(5, SIZE).numpy(), jnp.bfloat16)
    expected = jnp.concatenate((signs[0] * x[:, HALF:], signs[1] * x[:, :HALF]), axis=-1)
    with tracing_only(platform="TPU"):
        made = turned(x, signs)
    assert made.dtype == x.dtype
    assert jnp.array_equal(made, expected)


SHAPES = [(2, 4, 16, 128), (2, 16, 4, 128), (2, 16, 16, 256), (2, 12, 4, 128), (2, 16, 4, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_and_positions_exchanged_for_tpus_are_the_same(shape: tuple[int, ...]) -> None:
    x = jnp.arange(math.prod(shape)).reshape(shape)
    with tracing_only(platform="TPU"):
        assert jnp.array_equal(transpose(x, 1, 2), jnp.swapaxes(x, 1, 2))
        dims = str(jax.make_jaxpr(lambda x: transpose(x, -2, 1))(x))
    # Whole tiles of 8 positions move where there are such.
    assert ("permutation=(0, 2, 1, 3)" in dims) == (shape in SHAPES[3:])


class Rotary(nn.Module):
    """Turned heads, of which the gradients are turned back."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.q, self.turn = nn.Linear(WIDTH, WIDTH, bias=False), turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(*x.shape[:-1], HEADS, SIZE).transpose(1, 2)
        cos = torch.linspace(0, 1, LENGTH, device=x.device)[:, None].to(q.dtype)
        return (q * cos + self.turn(q) * (1 - cos)).float().square().mean()


@pytest.mark.parametrize("turn", [sliced, chunked])
def test_a_program_for_tpus_has_products_in_their_place(turn: Turn) -> None:
    engine = start(Rotary(turn), bf16={"enabled": True})
    text = step_for_tpus(engine, torch.ones(8, LENGTH, WIDTH, dtype=torch.bfloat16))
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert sum(f"tensor<{SIZE}x{SIZE}xbf16>" in line for line in products) == 2
    assert "stablehlo.concatenate" not in text


@pytest.mark.parametrize(
    ("turn", "dtype"),
    [(sliced, torch.float32), (UNLIKE["no sign changed"], torch.bfloat16)],
    ids=["fp32", "no sign changed"],
)
def test_what_a_product_would_change_stays_as_it_is(turn: Turn, dtype: torch.dtype) -> None:
    engine = start(Rotary(turn), bf16={"enabled": dtype == torch.bfloat16})
    text = step_for_tpus(engine, torch.ones(8, LENGTH, WIDTH, dtype=dtype))
    assert "stablehlo.concatenate" in text
    assert f"tensor<{SIZE}x{SIZE}x" not in text


def test_what_is_wider_than_heads_are_is_no_product() -> None:
    x = jnp.ones((2, 512), jnp.bfloat16)
    with tracing_only(platform="TPU"):
        assert "dot_general" not in str(jax.make_jaxpr(lambda x: turned(x, (-1, 1)))(x))


def cycles() -> int:
    return cycles_on_v5e(lambda: Rotary(sliced), LENGTH, WIDTH)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
def test_the_tpus_compiler_needs_fewer_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = cycles()
    monkeypatch.setattr(_graph_function, "with_turned_halves", lambda steps: steps)
    assert ours < 0.9 * cycles()
