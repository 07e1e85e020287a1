"""Rows and positions of programs for TPUs, which products with weights don't merge into one dim."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend.jax.graph import _graph_function
from spmdzero.compat.tensor_fragment import safe_get_full_grad
from tests.jax_backend.for_tpus import cycles_on_v5e, step_for_tpus
from tests.support.engines import assert_trained_as, start

DEVICES, ROWS, LENGTH, HEADS, WIDTH = 8, 3, 20, 2, 32
# Of a device, which nothing else has as many of.
MERGED = f"{ROWS * LENGTH}x"


class Block(nn.Module):
    """[rows, length, width] -> the same, with a projection of its own for each of attention's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            to(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2)
            for to in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    """The mean square of what two blocks make."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


WAYS = [{}, {"recompute": "everything"}, {"scan": "on"}]


@pytest.mark.parametrize("spmd", WAYS, ids=["alone", "computed again", "in a loop"])
def test_what_is_trained_is_the_same(monkeypatch: pytest.MonkeyPatch, spmd: dict[str, str]) -> None:
    monkeypatch.setattr(_graph_function, "is_for_tpu", lambda: True)
    torch.manual_seed(0)
    model, theirs = Blocks(), Blocks()
    theirs.load_state_dict(model.state_dict())
    # Adam would make a step of rounding where a gradient is nearly 0.
    told = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "spmd": spmd}
    told |= {"zero_allow_untested_optimizer": True}
    engine = start(model, train_micro_batch_size_per_gpu=ROWS, **told)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        batch = torch.randn(DEVICES * ROWS, LENGTH, WIDTH)
        ours = engine.train_batch(batch)
        loss = theirs(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(ours.cpu(), loss.detach(), rtol=1e-6, atol=1e-6)
    assert_trained_as(engine, theirs)


@pytest.mark.parametrize("spmd", WAYS, ids=["alone", "computed again", "in a loop"])
def test_no_product_for_tpus_has_them_merged(spmd: dict[str, str]) -> None:
    told = {"train_micro_batch_size_per_gpu": ROWS, "spmd": spmd}
    engine = start(Blocks(), bf16={"enabled": True}, **told)
    batch = torch.ones(DEVICES * ROWS, LENGTH, WIDTH, dtype=torch.bfloat16)
    text = step_for_tpus(engine, batch)
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 18
    assert [line for line in products if f"tensor<{MERGED}" in line] == []


def pairs(flat: torch.Tensor) -> torch.Tensor:
    """The squared distance of each token from each."""
    squares = flat.square().sum(-1)
    return squares[:, None] + squares - 2 * flat @ flat.t()


def by_columns(flat: torch.Tensor) -> torch.Tensor:
    """Tokens in the order of rows, with tokens in the order of positions."""
    other = flat.view(ROWS, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
    return flat * other


def few(flat: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """An index of fewer rows and columns than there are."""
    return torch.arange(3 * rows, device=flat.device).view(rows, 3) % 5


# What mixes the tokens `[rows * length, width]` of a device, or looks as if it did.
MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "outer": lambda flat: flat.sum(-1) * torch.arange(1.0, 4.0, device=flat.device)[:, None],
    "pairs": pairs,
    "a row for a column": lambda flat: flat[:, 0] + flat @ flat.t(),
    "copies": lambda flat: torch.zeros(3, len(flat), device=flat.device).copy_(flat[:, 0]),
    "scatter": lambda flat: flat.scatter(1, few(flat), 0.0),
    "scatter_add": lambda flat: flat.scatter_add(1, few(flat, 2), flat.detach()),
    "scatter of more rows": lambda flat: flat.scatter(1, few(flat, 5), flat.detach().repeat(2, 1)),
    "gather": lambda flat: flat.gather(1, few(flat, 4)),
    "sum of all dims": lambda flat: flat.sum(dim=(0, 1)),
    "sum of no dims": lambda flat: flat.sum(dim=None),
    "by columns": by_columns,
}


class Mixes(nn.Module):
    """A loss in which each number of `made` has a weight of its own."""

    def __init__(self, *made: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.made, self.layer = made, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.layer(x).view(-1, WIDTH)
        return sum((self._weighted(made(flat)) for made in self.made), torch.zeros(()))

    def _weighted(self, found: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1, 1, found.numel(), device=found.device).view(found.shape)
        return (found * weights).mean()


def assert_computes_as_torch(model: Mixes, **mesh: int) -> None:
    replicas = DEVICES // mesh.get("sequence", 1)
    x = torch.randn(replicas * ROWS, LENGTH, WIDTH)
    expected = torch.stack([model(rows) for rows in x.split(ROWS)]).mean()
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    spmd = {"mesh": mesh} if mesh else {}
    engine = start(model, train_micro_batch_size_per_gpu=ROWS, spmd=spmd)
    loss = engine(x)
    engine.backward(loss)
    # fp32 sums in another order.
    torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        found = safe_get_full_grad(parameter)
        assert found is not None
        torch.testing.assert_close(found.cpu(), gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_is_computed_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(_graph_function, "is_for_tpu", lambda: True)
    torch.manual_seed(0)
    assert_computes_as_torch(Mixes(MIXED[name]))


def test_what_mixes_tokens_is_computed_of_the_positions_of_all_devices() -> None:
    torch.manual_seed(0)
    assert_computes_as_torch(Mixes(*MIXED.values()), fsdp=DEVICES // 2, sequence=2)


def cycles() -> int:
    return cycles_on_v5e(lambda: Blocks(256, 4), 512, 256)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
def test_the_tpus_compiler_needs_fewer_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = cycles()
    monkeypatch.setattr(_graph_function, "is_for_tpu", lambda: False)
    assert ours < 0.95 * cycles()


class Words(nn.Module):
    """The loss of a language model of one layer, of rows and labels `[rows, length]`."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Embedding(1024, 256), nn.Linear(256, 256)
        self.head = nn.Linear(256, 1024)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.token(ids))).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
def test_stage_3_compiles_with_the_flags_of_a_set() -> None:
    """libtpu 0.0.21 ends its process where labels have two dims."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "spmd": {"xla_flags": "auto"},
    }
    with torch.device("meta"):
        model, ids = Words(), torch.zeros(2 * DEVICES, 512, dtype=torch.long)
    found = spmdzero.explain(model, config, (ids, ids), tpu=["v5e:2x4"], stages=())
    assert found.moves_on("v5e:2x4").activations == ()
    assert found.time_on("v5e:2x4").exposed < found.time_on("v5e:2x4").wire
