"""A model's arithmetic beside torch's own count of a forward and a backward."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spmdzero
from spmdzero.backend import Product, Work
from spmdzero.backend.replica._work_counter import product_of
from spmdzero.engine import counting_work

pytestmark = pytest.mark.backends("jax")

WIDTH, WORDS, LENGTH, ROWS, DEVICES = 32, 50, 8, 2, 8
TOKENS = torch.arange(DEVICES * ROWS * LENGTH).reshape(-1, LENGTH) % WORDS
IMAGES = torch.ones(DEVICES * ROWS, 3, 8, 8)


def counted(model: nn.Module, x: torch.Tensor, *, grad: bool = True, **config: Any) -> Work:
    """What a device has to do, times the number of devices."""
    sections: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW"}, **config
    }  # fmt: skip
    engine, *_ = spmdzero.initialize(model=model, config=sections)
    with counting_work() as count, torch.set_grad_enabled(grad):
        engine(x)
    return count.take().times(DEVICES)


def by_torch(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    return counter.get_total_flops()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.b(self.a(x).relu())).mean((2, 3))).square().mean()


class Words(nn.Module):
    """An embedding, and what makes a loss of `[rows, LENGTH, WIDTH]`."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.token(tokens)).square().mean()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Encoder(Words):
    """With dropout torch computes attention as products, which its count sees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True) for _ in range(4)
        )

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Adapters(Words):
    """Frozen weights, with adapters beside them; no gradient reaches the first block's input."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(4))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for own, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = (own(x) + up(down(x))).relu()
        return x


class Teacher(Words):
    """Half of it is computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            other = self.teacher(x)
        return self.own(x) - other


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x * 1.0) @ (weight * 1.0).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


# As many scripts do, before anything watches it.
product = _Product.apply


class OwnFunction(Words):
    """Its product is a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, WIDTH))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight)


class Layers(Words):
    """`reentrant` says how torch's checkpoint computes each layer again; None for not at all."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            ran = functools.partial(_run, layer)
            again: Any = checkpoint
            on = self.reentrant is not None
            x = again(ran, x, use_reentrant=self.reentrant) if on else ran(x)
        return x


def _run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).tanh()


@pytest.mark.parametrize(
    ("made", "x"),
    [
        (Images, IMAGES), (Encoder, TOKENS), (Adapters, TOKENS), (Teacher, TOKENS),
        (OwnFunction, TOKENS), (Layers, TOKENS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [2, 3])
def test_it_is_torchs_count_of_a_forward_and_a_backward(
    made: Callable[[], nn.Module], x: torch.Tensor, stage: int
) -> None:
    work = counted(made(), x, zero_optimization={"stage": stage})
    assert work == Work(flops=by_torch(made(), x))


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_devices_that_share_a_replica_have_a_part_each(axis: str) -> None:
    partition = {"partition": {"layers.*.weight": "column"}} if axis == "tensor" else {}
    spmd = {"mesh": {"fsdp": -1, axis: 2}, **partition}
    rows = TOKENS[: len(TOKENS) // 2]
    assert counted(Layers(), rows, spmd=spmd) == Work(flops=by_torch(Layers(), rows))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_torchs_checkpoint_computes_again_is_left_out(reentrant: bool) -> None:
    assert by_torch(Layers(reentrant), TOKENS) > by_torch(Layers(), TOKENS)
    assert counted(Layers(reentrant), TOKENS) == Work(flops=by_torch(Layers(), TOKENS))


def test_a_forward_without_gradients_has_no_backward() -> None:
    whole, alone = counted(Layers(), TOKENS), counted(Layers(), TOKENS, grad=False)
    assert whole.flops == 3 * alone.flops > 0


def test_counting_changes_neither_losses_nor_what_a_module_holds_or_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Noting(Images):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            print("called", self.calls)
            return super().forward(F.dropout(x, 0.5))

    def trained(counts: bool) -> tuple[list[float], int, torch.Tensor]:
        torch.manual_seed(0)
        engine, *_ = spmdzero.initialize(
            model=Noting(),
            config={"train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW"}},
        )
        losses = []
        for step in range(3):
            with counting_work() if counts and step == 1 else torch.enable_grad():
                loss = engine(IMAGES)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, engine.module.calls, engine.module.norm.running_mean.cpu()

    losses, calls, mean = trained(True)
    printed = capsys.readouterr().out
    same, plain_calls, plain_mean = trained(False)
    assert (losses, calls) == (same, plain_calls)
    assert printed == capsys.readouterr().out != ""
    assert torch.equal(mean, plain_mean)


def attending(**options: Any) -> nn.Module:
    class Attending(Words):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*heads, **options)

    return Attending()


def test_of_causal_attention_half_of_the_pairs_count() -> None:
    causal, whole = counted(attending(is_causal=True), TOKENS), counted(attending(), TOKENS)
    pairs = 3 * 4 * DEVICES * ROWS * LENGTH**2 * WIDTH
    weights = 3 * 2 * TOKENS.numel() * WIDTH * 3 * WIDTH
    assert (causal.flops, whole.flops) == (weights + pairs / 2, weights + pairs)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_kernels_whose_blocks_are_padded_count_as_torchs_attention(options: Any) -> None:
    by_kernel = counted(attending(**options), TOKENS, spmd={"attention": "kernel"})
    assert by_kernel == counted(attending(**options), TOKENS)


def test_rows_that_devices_cannot_share_count_once() -> None:
    config = {"train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW"}}
    engine, *_ = spmdzero.initialize(model=Layers(), config=config)
    engine.eval()
    with counting_work() as count, torch.no_grad():
        engine(TOKENS[:-3])
    assert 3 * count.take().times(DEVICES).flops == by_torch(Layers(), TOKENS[:-3])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolutions_backward_that_runs_is_as_much_as_its_forward_for_each_gradient(
    groups: int, transposed: bool
) -> None:
    aten = torch.ops.aten
    x, weight = torch.ones(2, 8, 6, 6), torch.ones(8, 8 // groups, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    made = aten.convolution(x, weight, None, *how)
    forward = product_of(aten.convolution.default, (x, weight, None, *how), {}, made)
    mask = [False, True, False]
    backward = product_of(
        aten.convolution_backward.default, (made, x, weight, [8], *how, mask), {}, None
    )
    assert isinstance(forward, Product)
    assert isinstance(backward, Product)
    assert forward.flops == backward.flops == 2 * 2 * 8 * (8 // groups) * 6 * 6 * 9


def test_what_it_does_not_know_it_names() -> None:
    class Inverse(Words):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Parameter(torch.eye(WIDTH))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.linalg.inv(self.square)

    work = counted(Inverse(), TOKENS)
    assert work.unknown == ("how much arithmetic aten.linalg_inv_ex.default is isn't known",)
