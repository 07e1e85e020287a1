"""Equal blocks as one loop: when they become one, and that nothing else changes."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from spmdzero.backend import Mesh, programs
from spmdzero.errors import ReplicaRegionError
from tests.unit.region_harness import ROWS, Probe

DIM = 4
X = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Each instance has its number, as a layer of transformers does."""

    def __init__(self, number: int, change: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("count", torch.zeros(()))
        self.number, self.change, self.calls = number, change, 0

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        y = x + self.drop(torch.tanh(self.line(self.norm(x))))
        return y if self.change is None else self.change(self, y, *others)


class Model(nn.Module):
    def __init__(
        self, change: Callable[..., Any] | None = None, run: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, change) for number in range(5))
        self.run = run or _one_after_the_other
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.run(self.blocks, x).square().mean()


def _one_after_the_other(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def trained(mesh: Mesh, scan: Any, **model: Any) -> tuple[int, list[torch.Tensor]]:
    """How many loops the forward has, and the loss and all gradients."""
    torch.manual_seed(0)
    made = Model(**model)
    probe = Probe(made, mesh, scan=scan)
    torch.manual_seed(1)
    loss = probe(probe.batch(X))
    loops = programs.text([loss]).count(" while(")
    probe.backward(loss)
    after = torch.rand(()), *probe.buffers.values()
    return loops, [loss.detach().cpu(), *(g for _, g in sorted(probe.gradients.items())), *after]


def assert_same(mesh: Mesh, *, loops: int, **model: Any) -> None:
    none, expected = trained(mesh, "off", **model)
    found, values = trained(mesh, "on", **model)
    assert (none, found) == (0, loops)
    for value, theirs in zip(values, expected, strict=True):
        # fp32's 7 digits: the compiler may fuse a block's operations otherwise in a loop.
        torch.testing.assert_close(value, theirs, rtol=2e-6, atol=1e-7)


def _with_table(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    table = x.mean(0)  # It has a gradient, to which each block adds.
    for block in blocks:
        x = block(x, table)
    return x


def _add_table(block: Block, y: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return y * 0.5 + table


def _as_tuple(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)[0]
    return x


def _checkpointed(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"run": _with_table, "change": _add_table},
        pytest.param(
            {"run": _as_tuple, "change": lambda block, y: (y, None)}, marks=pytest.mark.slow
        ),
        pytest.param({"run": _checkpointed}, marks=pytest.mark.slow),
    ],
    ids=["dropout", "a shared input with a gradient", "a tuple", "checkpointed"],
)
def test_a_loop_computes_what_its_blocks_do(mesh: Mesh, model: dict[str, Any]) -> None:
    assert_same(mesh, loops=1, **model)


def test_a_forward_without_gradients_is_a_loop_too(mesh: Mesh) -> None:
    probe = Probe(Model(), mesh, scan="on")
    with torch.no_grad():
        assert programs.text([probe(probe.batch(X))]).count(" while(") == 1


def _keeps_all(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    kept = []
    for block in blocks:
        x = block(x)
        kept.append(x)
    return torch.stack(kept).sum(0)


def _tables_of_their_own(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    table = x.mean(0)
    for block in blocks:
        x = block(x, table * 1)
    return x


def _by_keyword(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x=x)
    return x


def _stops_in_between(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(blocks):
        x = block(x)
        if number == 2:
            x = x * 2
    return x


def _read(block: Block, y: torch.Tensor) -> torch.Tensor:
    return y * float(block.count + 2)


def _write(block: Block, y: torch.Tensor) -> torch.Tensor:
    block.count.add_(1)
    return y


def _write_data(block: Block, y: torch.Tensor) -> torch.Tensor:
    block.norm.bias.data = block.norm.bias.data * 0.5
    return y


def _collects(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for block in blocks:
        x = block(x, found)
    return x + sum(found)


def _collect(block: Block, y: torch.Tensor, found: Any) -> torch.Tensor:
    found.append(y.mean())
    return y


def _count(block: Block, y: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    # A block that is traced for its backward and for its forward would count twice.
    return y * (1 + block.calls % 2)


def _draw(block: Block, y: torch.Tensor) -> torch.Tensor:
    return y * (1 + float(torch.rand(())))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"run": _keeps_all}, "in the middle returns is kept"),
        (
            {"run": _tables_of_their_own, "change": _add_table},
            "is given another tensor than the one before",
        ),
        ({"run": _by_keyword}, "the first argument of one is no tensor"),
        ({"change": _draw}, "draws from torch's CPU generator"),
        ({"run": _collects, "change": _collect}, "changes what it is given"),
        ({"change": _count}, "changes the module: 'calls'"),
        ({"change": lambda block, y: y * (1 + block.number)}, "computes otherwise"),
        ({"change": _write}, "writes to its parameters, buffers"),
        ({"change": _write_data}, "writes to its parameters"),
        pytest.param(
            {"run": _stops_in_between}, "is done between two of them", marks=pytest.mark.slow
        ),
        pytest.param({"change": _read}, "reads a value", marks=pytest.mark.slow),
    ],
    ids=[
        *("kept", "tables of their own", "by keyword", "drawn", "collected", "counted"),
        *("numbered", "written", "written by data", "computed with", "read"),
    ],
)
def test_what_is_no_loop_computes_what_it_did(
    mesh: Mesh,
    model: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        assert_same(mesh, loops=0, **model)
    assert "are not compiled as one loop" in caplog.text
    assert reason in caplog.text


def test_a_model_without_equal_blocks_is_told_so(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        probe = Probe(nn.Linear(DIM, 2), mesh, scan="on")
        probe(probe.batch(X))
    assert "no four equal blocks follow each other" in caplog.text


def test_a_block_with_a_hook_is_no_loop(mesh: Mesh) -> None:
    calls: list[int] = []
    probe = Probe(Model(), mesh, scan="on")
    probe.module.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    assert programs.text([probe(probe.batch(X))]).count(" while(") == 0
    assert calls == [1]


def test_hooks_on_all_modules_leave_a_loop_a_loop(mesh: Mesh) -> None:
    # `explain` names what a module's backward computes by such a hook, which keeps its nodes.
    nodes: list[object] = []
    hook = register_module_forward_hook(lambda _, __, made: nodes.append(made.grad_fn))
    try:
        probe = Probe(Model(), mesh, scan="on")
        assert programs.text([probe(probe.batch(X))]).count(" while(") == 1
    finally:
        hook.remove()


def _uses_the_last_but_one(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    *first, last = blocks
    for block in first:
        x = block(x)
    return last(x) + x


def test_a_value_that_a_loop_does_not_keep_is_computed_block_by_block(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        assert_same(mesh, loops=0, run=_uses_the_last_but_one)
    assert "compiled one by one, and not as one loop: " in caplog.text


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def test_a_gradient_that_would_be_lost_is_an_error(mesh: Mesh) -> None:
    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(blocks):
            x = block(x)
            if number == 2:
                # torch hands it on as it is, without asking who computes with it.
                x = _Twice.apply(x)
        return x

    probe = Probe(Model(run=run), mesh, scan="on")
    with pytest.raises(ReplicaRegionError, match='"scan": "off"'):
        probe.backward(probe(probe.batch(X)))
