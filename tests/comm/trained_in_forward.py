"""A model whose loss and norms are over the rows of all devices, and torch's of the whole batch."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spmdzero

MICRO, WIDTH, STEPS = 2, 8, 5
# A large epsilon, so that Adam doesn't make steps of the noise in gradients near 0.
ADAM = {"lr": 0.05, "weight_decay": 0.01, "eps": 1e-3}
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Takes the mean of all rows away, of the batch or of all devices."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.layer, self.whole = nn.Linear(WIDTH, WIDTH), whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        mean = made.mean(0)
        if not self.whole:
            mean = dist.nn.all_reduce(mean) / dist.get_world_size()
        return x + (made - mean).tanh()


class Towers(nn.Module):
    """Two towers with a contrastive loss of all rows; `whole` where a forward has them all."""

    def __init__(self, *, whole: bool, norm: bool = False, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole, self.checkpointed = whole, checkpointed
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[Block(whole=whole) for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.to(self.one.weight.dtype), y.to(self.one.weight.dtype)
        one, other = self.one(x), self.other(y)
        if self.checkpointed and not self.whole:
            reentrant = self.checkpointed == "reentrant"
            return checkpoint(self.loss, one, other, use_reentrant=reentrant)
        return self.loss(one, other)

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one, other = self.norm(self.blocks(one)).float(), self.blocks(other).tanh().float()
        others, first = other, 0
        if not self.whole:
            others = torch.cat(dist.nn.all_gather(other))
            first = len(one) * dist.get_rank()
        labels = torch.arange(len(one), device=one.device) + first
        return F.cross_entropy(one @ others.t(), labels)


def batches(devices: int, accumulation: int) -> list[Batch]:
    torch.manual_seed(1)
    shape = (STEPS * accumulation, devices * MICRO, WIDTH)
    return list(zip(torch.randn(shape), torch.randn(shape), strict=True))


def by_torch(devices: int, accumulation: int, *, norm: bool) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the state after all steps, of plain torch on the whole batch."""
    model = Towers(whole=True, norm=norm)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)  # pyrefly: ignore[bad-argument-type]
    losses, given = list[float](), iter(batches(devices, accumulation))
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [model(*next(given)) / accumulation for _ in range(accumulation)]
        torch.stack(parts).sum().backward()
        # As "gradient_clipping" is by default.
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses, model.state_dict()


def by_engine(
    devices: int, way: str, accumulation: int, *, model: Towers, config: dict[str, Any]
) -> tuple[list[float], dict[str, Any]]:
    """The same of an engine that is called as `way` says: "train_batch", "calls" or "plain"."""
    whole: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": ADAM},
        **config,
    }
    engine, *_ = spmdzero.initialize(model=model, config=whole)
    given = iter(batches(devices, accumulation))
    losses = [_step(engine, way, accumulation, given) for _ in range(STEPS)]
    state = {name: value.detach().cpu() for name, value in engine.module.state_dict().items()}
    return losses, state


def _step(engine: Any, way: str, accumulation: int, given: Iterator[Batch]) -> float:
    if way == "train_batch":
        return float(engine.train_batch(given))
    total = 0.0
    for _ in range(accumulation):
        loss = engine(*next(given))
        if way == "plain":
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        total += loss.item() / accumulation
    return total
