"""A tensor that a forward keeps in an attribute, and that all replicas share, is there later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from tests.engine.captured import LENGTH, WAYS, WIDTH, batches, make_engine, three_calls

Length = Callable[[int], int]


def same(_: int) -> int:
    return LENGTH


def by_five(step: int) -> int:
    return LENGTH + step // 5


class Attending(nn.Module):
    """A layer that makes its mask, its angles and its counter in the first forward of a length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rates", 1 / 100 ** (torch.arange(WIDTH) / WIDTH))
        self.register_buffer("places", None, persistent=False)
        self.mask: torch.Tensor | None = None
        self.angles: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.mask is None or self.mask.size(0) != length:
            mask = torch.full((length, length), float("-inf")).triu(1)
            self.mask = mask.to(x.device)
            self.angles = torch.outer(torch.arange(length, device=x.device), self.rates).cos()
        if self.places is None:
            self.places = torch.arange(2 * LENGTH, device=x.device)[:, None] / length
        h = self.embed(x) * self.angles + self.places[:length]
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask)
        return F.mse_loss(self.head(h), x.flip(-1))


class OfABlock(Attending):
    """One whose layer is recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Writing(Attending):
    """One that counts its forwards in a tensor that the first of them has made."""

    total: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.total is None:
            self.total = torch.zeros((), device=x.device)
        self.total += 1
        return super().forward(x) * self.total


def plain(steps: int, kind: type[nn.Module] = Attending, length: Length = same) -> list[float]:
    """The losses of plain torch."""
    torch.manual_seed(0)
    module = kind()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0)
    losses = []
    for step in range(steps):
        ((x,),) = batches(1, length(step), first=step)
        loss = module(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(kind: type[nn.Module] = Attending, **config: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    return make_engine(kind(), gradient_clipping=0.0, **config)


class Reading(Attending):
    """One whose forward reads the mask, as `nn.Transformer`'s, which computes all that pends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        assert self.mask is not None
        assert not self.mask.isinf().all()
        return loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "stage"), [(Attending, 2), (Attending, 3), (OfABlock, 2), (OfABlock, 3), (Reading, 2)]
)
def test_a_mask_that_a_forward_keeps_is_that_of_plain_torch(
    kind: type[nn.Module], stage: int, way: str
) -> None:
    run = WAYS[way]
    engine = trained(kind, zero_optimization={"stage": stage})
    assert run(engine, 7) == pytest.approx(plain(7, kind), rel=1e-5)
    # The first forward changes the module, and three that are equal come before one is folded.
    assert (engine.capture.reason is None) == (kind is not Reading), engine.capture
    assert engine.module.mask.cpu().equal(torch.full((LENGTH, LENGTH), float("-inf")).triu(1))


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_is_made_anew_where_the_length_changes(way: str) -> None:
    run = WAYS[way]
    engine = trained()
    losses = [run(engine, 1, length=by_five(step), first=step)[0] for step in range(10)]
    assert losses == pytest.approx(plain(10, length=by_five), rel=1e-5)
    assert engine.capture.reason is None, engine.capture


def test_a_mask_of_an_evaluation_is_used_in_training() -> None:
    engine = trained()
    with torch.no_grad():
        before = engine(next(batches(1))[0]).item()
    losses = three_calls(engine, 5)
    assert losses == pytest.approx(plain(5), rel=1e-5)
    assert before == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_kept_tensor_that_each_forward_writes_counts_them(way: str) -> None:
    engine = trained(Writing)
    assert WAYS[way](engine, 6) == pytest.approx(plain(6, Writing), rel=1e-5)
    assert engine.module.total.item() == 6


class Growing(Attending):
    """One whose buffer has the length of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != x.shape[1]:
            self.places = torch.arange(x.shape[1], device=x.device)[:, None] / LENGTH
        return super().forward(x)


def test_a_buffer_that_changes_its_length_is_refused_with_its_line() -> None:
    engine = trained(Growing)
    three_calls(engine, 4)
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"test_kept_\w+.py:\d+.*'places'"):
        three_calls(engine, 1, length=LENGTH + 1)


class Remembering(Attending):
    def __init__(self, computed: Callable[["Remembering", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.computed = computed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary = self.computed(self, x)
        return super().forward(x)


@pytest.mark.parametrize(
    "computed",
    [
        lambda _, x: x.mean(),
        lambda _, x: torch.rand(3, device=x.device),
        lambda model, _: model.head.weight * 2,
        lambda _, x: (x.sum(), x.isnan().any().item())[0],
    ],
    ids=["rows", "a draw", "with a gradient", "rows that are computed by then"],
)
def test_what_may_differ_between_replicas_is_refused(computed: Any) -> None:
    torch.manual_seed(0)
    engine = make_engine(Remembering(computed))
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"'auxiliary'.*return it"):
        three_calls(engine, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_computed_of_parameters_is_that_of_the_latest_forward(stage: int) -> None:
    torch.manual_seed(0)
    module = Remembering(lambda model, _: model.head.weight.detach() * 2)
    engine = make_engine(module, zero_optimization={"stage": stage})
    for (x,) in batches(3):
        weight = engine.module.head.weight.detach().cpu()
        engine.backward(engine(x))
        engine.step()
        assert engine.module.auxiliary.cpu().equal(weight * 2)
