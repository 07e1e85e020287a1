"""Models whose forward calls torch.distributed's collectives, and their loss and gradients.

``python -m tests.comm.in_forward ranks`` prints those of real ranks, one process each, as DDP has
them: the mean of losses and of gradients. ``... devices`` prints the engine's. Run by
test_in_forward.py.
"""

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F

from tests.comm.newest_names import gather_single

ROWS, WIDTH, WORLD = 3, 5, 4


class Asking(nn.Module):
    """A model whose forward calls `ask` with its output; it keeps a world size of hosts."""

    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
        super().__init__()
        self.layer, self.ask, self.world_size = nn.Linear(width, width), ask, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ask(self.layer(x)).sum()


class Pair(nn.Module):
    """Two towers; a loss of their rows is what the subclasses differ in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.one(x), self.other(y).tanh())

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise AssertionError


class GatheredWithGradient(Pair):
    """open_clip's loss with `gather_with_grad` and `local_loss`."""

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        alone = dist.get_world_size() == 1
        others = other if alone else torch.cat(dist.nn.all_gather(other))
        labels = torch.arange(len(one), device=one.device) + len(one) * dist.get_rank()
        return F.cross_entropy(one @ others.t(), labels)


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    places = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(places, tensor.contiguous())
    return places


class OwnRowsInTheList(Pair):
    """SimCSE's loss, and open_clip's without gradients of what it gathers."""

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ones, others = gathered(one), gathered(other)
        ones[dist.get_rank()] = one
        others[dist.get_rank()] = other
        ones, others = torch.cat(ones), torch.cat(others, dim=0)
        return F.cross_entropy(ones @ others.t(), torch.arange(len(ones), device=ones.device))


class OwnRowsInTheBuffer(Pair):
    """The same with one tensor for all rows, and labels by bounds."""

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        rows, rank = len(other), dist.get_rank()
        others = torch.zeros(rows * dist.get_world_size(), other.shape[1], device=other.device)
        gather_single(others, other.detach())
        others[rank * rows : (rank + 1) * rows] = other
        labels = torch.arange(rank * rows, (rank + 1) * rows, device=one.device)
        own = others[rows * rank : rows * rank + rows, :4]
        return F.cross_entropy(one @ others.t(), labels) + (own * one[:, :4]).mean()


class GatherLayer(torch.autograd.Function):
    """VICReg's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gathered(x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]


class Vicreg(Pair):
    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x = torch.cat(GatherLayer.apply(one), dim=0)
        y = torch.cat(GatherLayer.apply(other), dim=0)
        x = x - x.mean(dim=0)
        cov = (x.T @ x) / (len(x) - 1)
        std = torch.sqrt(y.var(dim=0) + 1e-4)
        return cov.pow(2).sum() / 6 + F.relu(1 - std).mean() + F.mse_loss(one, other)


class BarlowTwins(Pair):
    """Its all_reduce is torch's plain one, past which the gradient goes as it is."""

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        c = one.T @ other
        c = c.div(len(one) * dist.get_world_size())
        dist.all_reduce(c)
        on_diagonal = (torch.diagonal(c) - 1).pow(2).sum()
        return on_diagonal + 0.005 * (c - torch.diag(torch.diagonal(c))).pow(2).sum()


class Statistics(Pair):
    """A batch norm over all rows, as SyncBatchNorm's."""

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        count = torch.tensor([float(len(one))])
        dist.all_reduce(count)
        mean = dist.nn.all_reduce(one.sum(0)) / count.item()
        variance = dist.nn.all_reduce((one - mean).pow(2).sum(0)) / count.item()
        normed = (one - mean) / torch.sqrt(variance + 1e-5)
        largest = other.detach().abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return (normed * other).pow(2).mean() / largest


class Scattered(Pair):
    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        parts = [one * (place + 1) for place in range(dist.get_world_size())]
        own = dist.nn.reduce_scatter(torch.empty_like(one), parts)
        first = dist.nn.broadcast(other.sum(0), 1)
        return (own * other).mean() + (one @ first).pow(2).mean()


class Moco(Pair):
    """MoCo's queue, and its shuffle of all rows by a random order that one rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(6, 24), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = torch.cat(gathered(other))
            order = torch.arange(len(rows), device=rows.device).flip(0) + dist.get_rank()
            dist.broadcast(order, src=0)
            own = order.view(dist.get_world_size(), -1)[dist.get_rank()]
            keys = rows[own]
        positive = (one * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, one @ self.queue.clone()], dim=1)
        with torch.no_grad():
            pointer = int(self.pointer)
            self.queue[:, pointer : pointer + len(rows)] = rows.T
            self.pointer[0] = (pointer + len(rows)) % self.queue.shape[1]
        labels = torch.zeros(len(one), dtype=torch.long, device=one.device)
        return F.cross_entropy(logits, labels) + other.pow(2).mean()


class MocoShuffle(Pair):
    """MoCo's: rank 0's random order on all ranks, by which rows go to others and come back."""

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size()
        with torch.no_grad():
            order = torch.randperm(len(other) * world, device=other.device)
            dist.broadcast(order, src=0)
            own = order.view(world, -1)[dist.get_rank()]
            shuffled = torch.cat(gathered(other))[own] * 2
            back = torch.argsort(order).view(world, -1)[dist.get_rank()]
            keys = torch.cat(gathered(shuffled))[back]
        return (one * keys).sum(1).sigmoid().mean() + other.pow(2).mean()


class GradCache(Pair):
    """GradCache's loss: own part put in the place of what a gather found, for two towers."""

    def loss(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ones, others = self.gather_tensor(one), self.gather_tensor(other)
        per_row = len(others) // len(ones)
        target = torch.arange(0, len(others), per_row, dtype=torch.long, device=one.device)
        return F.cross_entropy(torch.matmul(ones, others.transpose(0, 1)), target)

    def gather_tensor(self, t: torch.Tensor) -> torch.Tensor:
        whole = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, t)
        whole[dist.get_rank()] = t
        return torch.cat(whole, dim=0)


MODELS = (
    GatheredWithGradient, OwnRowsInTheList, OwnRowsInTheBuffer, Vicreg, BarlowTwins, Statistics,
    Scattered, Moco, MocoShuffle, GradCache,
)  # fmt: skip
STEPS = 2


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    shape = (WORLD * ROWS, WIDTH)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(STEPS)]


def as_rank(rank: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    made = dist.FileStore(store, WORLD)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=WORLD)
    found = {}
    for kind in MODELS:
        model = nn.parallel.DistributedDataParallel(kind())
        seen = []
        for x, y in batches():
            model.zero_grad()
            own = slice(rank * ROWS, (rank + 1) * ROWS)
            loss = model(x[own], y[own])
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            gradients = [p.grad.flatten().tolist() for p in model.parameters()]
            seen.append([mean.item() / WORLD, gradients])
        found[kind.__name__] = seen
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def of_ranks(store: str) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    answers: Any = fork.Queue()
    ranks = [fork.Process(target=as_rank, args=(rank, store, answers)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    found = answers.get(timeout=120)
    for process in ranks:
        process.join()
    return found


def of_devices() -> dict[str, Any]:
    import spmdzero

    found = {}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        # The weights stay as they are, so that each step's gradients can be compared.
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
    }
    chosen = os.environ.get("MODELS", "").split()
    for kind in MODELS:
        if chosen and kind.__name__ not in chosen:
            continue
        engine, *_ = spmdzero.initialize(model=kind(), config=config)
        seen = []
        for x, y in batches():
            loss = engine(x, y)
            engine.backward(loss)
            gradients = [p.grad.flatten().tolist() for p in engine.module.parameters()]
            engine.step()
            seen.append([loss.item(), gradients])
        found[kind.__name__] = seen
    return found


if __name__ == "__main__":
    # As pyproject.toml has it for pytest's own process.
    warnings.filterwarnings("ignore", r"torch\.distributed\.nn\.functional\.", FutureWarning)
    print(json.dumps(of_ranks(sys.argv[2]) if sys.argv[1] == "ranks" else of_devices()))
