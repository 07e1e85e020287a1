"""torch's selective checkpointing: `checkpoint(..., context_fn=...)` of a script."""

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from spmdzero.engine import StepGraph
from spmdzero.hlo import read_matmuls
from spmdzero.inspect import peak_temporary_bytes
from tests.engine.test_recompute import ROWS, WIDTH, Block
from tests.support.engines import start

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

_aten = torch.ops.aten
PRODUCTS = [_aten.mm.default, _aten.addmm.default]
BLOCKS = 4


def nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def every_second_product() -> Any:
    """Counts, as torchtitan's policy does, apart for each run."""
    met: dict[bool, int] = collections.defaultdict(int)

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        met[context.is_recompute] += 1
        second = met[context.is_recompute] % 2 == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if second else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": functools.partial(create_selective_checkpoint_contexts, nothing),
    "half": every_second_product,
    "products": functools.partial(create_selective_checkpoint_contexts, PRODUCTS),
    "other contexts": lambda: (contextlib.nullcontext(), contextlib.nullcontext()),
}


class Stack(nn.Module):
    def __init__(self, context_fn: Callable[[], Any] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.context_fn = context_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.context_fn is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
        return x.square().mean()


@functools.cache
def trained(way: str | None, **spmd: Any) -> tuple[list[float], int, str]:
    """Three losses, the bytes that the program of a step needs, and the program."""
    torch.manual_seed(0)
    model = Stack(None if way is None else CONTEXTS[way])
    engine = start(model, train_micro_batch_size_per_gpu=ROWS, spmd=spmd)
    batch = torch.randn(8 * ROWS, WIDTH)
    torch.manual_seed(5)
    texts: list[str] = []

    def look(graph: StepGraph) -> None:
        texts.append(graph.hlo())

    with engine.observe(look):
        losses = [engine.train_batch(batch).item()]
    losses += [engine.train_batch(batch).item() for _ in range(2)]
    return losses, peak_temporary_bytes(texts[0]), texts[0]


@pytest.mark.parametrize("way", CONTEXTS)
def test_losses_are_those_without_checkpoints(way: str) -> None:
    # fp32: what is fused with what, and so rounded, differs.
    assert trained(way)[0] == pytest.approx(trained(None)[0], rel=1e-5)


def test_memory_is_that_of_what_the_policy_saves() -> None:
    keeps_all, keeps_none = (trained(None, recompute=p) for p in ("dots", "everything"))
    assert trained("products")[:2] == keeps_all[:2]
    assert trained("nothing")[:2] == keeps_none[:2]
    assert keeps_none[1] < trained("half")[1] < keeps_all[1]


def hidden(blocks: Any, x: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
    """Keeps what each block returns, as output_hidden_states does."""
    kept = [x]
    for block in blocks:
        kept.append(run(block, kept[-1]))
    return torch.stack(kept).mean(0)


def in_pairs(blocks: Any, x: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
    for one, other in zip(blocks[::2], blocks[1::2], strict=True):
        x = run(lambda x, one=one, other=other: other(one(x)), x)
    return x


def every_second(blocks: Any, x: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
    for number, block in enumerate(blocks):
        x = run(block, x) if number % 2 else block(x)
    return x


def by_turns(blocks: Any, x: torch.Tensor, run: Callable[..., Any]) -> torch.Tensor:
    for number, block in enumerate(blocks):
        x = run(block, x) if number % 2 else checkpoint(block, x, use_reentrant=False)
    return x


def by_policy(block: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=every_second_product)


class Runs(nn.Module):
    def __init__(self, order: Callable[..., torch.Tensor], run: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.order, self.run = order, run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.order(self.blocks, x, self.run).square().mean()


def losses_of(
    order: Callable[..., torch.Tensor], run: Callable[..., Any], scan: str
) -> list[float]:
    torch.manual_seed(0)
    engine = start(Runs(order, run), train_micro_batch_size_per_gpu=1, spmd={"scan": scan})
    batch = torch.randn(8, WIDTH)
    torch.manual_seed(5)
    return [engine.train_batch(batch).item() for _ in range(3)]


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "order",
    [
        hidden,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (in_pairs, every_second, by_turns)),
    ],
)
@pytest.mark.parametrize(
    "run", [by_policy, functools.partial(checkpoint, use_reentrant=False)], ids=["policy", "plain"]
)
def test_blocks_that_are_no_loop_after_all_are_checkpointed_one_by_one(
    order: Callable[..., torch.Tensor], run: Callable[..., Any]
) -> None:
    expected = losses_of(order, lambda block, x: block(x), "off")
    # fp32: what is fused with what, and so rounded, differs.
    assert losses_of(order, run, "on") == pytest.approx(expected, rel=1e-5)


class Differentiated(nn.Module):
    """Goes backward once more through the graph of its blocks, within its forward."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Tanh()) for _ in range(2)
        )
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x = x.detach().requires_grad_()
        for block in self.blocks:
            y = self.run(block, y)
        loss = y.square().mean()
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + gradient.detach().square().sum()


def test_a_counting_policy_says_the_same_in_each_backward() -> None:
    found = []
    for run in (by_policy, lambda block, x: block(x)):
        torch.manual_seed(0)
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        engine = start(
            Differentiated(run), optimizer=sgd, gradient_clipping=0.0,
            zero_allow_untested_optimizer=True,
        )  # fmt: skip
        torch.manual_seed(1)
        engine.train_batch(torch.randn(8, WIDTH))
        found.append(torch.cat([p.detach().cpu().flatten() for p in engine.module.parameters()]))
    # fp32's 7 digits, of weights below 1.
    assert (found[0] - found[1]).abs().max() < 1e-6


@pytest.mark.backends("jax")
def test_a_loop_keeps_what_the_policy_saves() -> None:
    loops = {way: trained(way, scan="on") for way in ("nothing", "half", "products")}
    for losses, _, text in loops.values():
        assert losses == pytest.approx(trained(None)[0], rel=1e-5)
        assert f'"known_trip_count":{{"n":"{BLOCKS}"}}' in text
    least, half, most = (found[1] for found in loops.values())
    # Of each block one product's output or two beside the input, on a device.
    one = BLOCKS * ROWS * WIDTH * 4
    assert half > least + one / 2
    assert most > half + one / 2


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


def attended(policy: Any) -> tuple[float, int]:
    """The loss, and the number of products in the program of a step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attends() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context = functools.partial(create_selective_checkpoint_contexts, policy)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, context_fn=context)
            return x.square().mean()

    torch.manual_seed(0)
    engine = start(Model(), train_micro_batch_size_per_gpu=1, spmd={"attention": "plain"})
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        loss = engine.train_batch(torch.randn(8, 32, WIDTH)).item()
    return loss, len(read_matmuls(texts[0]))


@pytest.mark.backends("jax")
def test_attentions_output_is_kept_by_the_name_of_any_of_torchs_kernels() -> None:
    def wide(_: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
        return operation is _aten._scaled_dot_product_efficient_attention.default and (
            args[0].shape[-1] == args[2].shape[-1] == WIDTH
        )

    loss, products = attended([_aten.mul.Tensor])
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    for policy in (*([getattr(_aten, name).default] for name in names), wide):
        same, fewer = attended(policy)
        assert same == pytest.approx(loss, rel=1e-5)
        # Of each of two blocks the weights' product with the values is not computed again.
        assert fewer == products - 2


@pytest.mark.backends("jax")
@pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="an older torch has no such policy"
)
@pytest.mark.parametrize("scan", ["off", "on"])
def test_what_the_policy_offloads_rests_in_host_memory_of_tpus(scan: str) -> None:
    from tests.jax_backend.for_tpus import step_for_tpus

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        name = "MUST_CPU_OFFLOAD" if operation in PRODUCTS else "PREFER_RECOMPUTE"
        return getattr(CheckpointPolicy, name)

    model = Stack(functools.partial(create_selective_checkpoint_contexts, policy))
    engine = start(model, train_micro_batch_size_per_gpu=1, spmd={"scan": scan})
    text = step_for_tpus(engine, torch.randn(8, WIDTH))
    assert '_xla_buffer_placement = "pinned_host"' in text
