"""Steps of a process whose compiled programs have little room; prints what came out, as JSON."""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spmdzero
from spmdzero.backend.torch_xla import memory_maps, runtime
from tests.engine.captured import assert_twins_agree, train, twins

PROGRAMS = 10
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_type": "linear"}}


def let_go(device: torch.device) -> None:
    """Uses as many other programs as torch_xla keeps."""
    for length in range(1, PROGRAMS + 3):
        (torch.ones(length, device=device) * 2).sum().item()


def replays() -> list[int]:
    """Traced and replayed micro-batches before their programs were lost and after."""
    counts = []

    def run(engine: spmdzero.Engine) -> list[float]:
        losses = train(engine, 6)
        counts.append((engine.capture.traced, engine.capture.replayed))
        let_go(engine.device)
        losses += train(engine, 4, first=6)
        counts.append((engine.capture.traced, engine.capture.replayed))
        return losses

    engines = twins(gradient_accumulation_steps=2, scheduler=SCHEDULE, fp16={"enabled": True})
    assert_twins_agree(engines, run)
    (before, after) = counts[2:]
    return [*before, *after]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


def slices(steps: int) -> list[int]:
    """The memory maps after each step on slices of a data set on the devices."""
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    engine, *_ = spmdzero.initialize(model=Classifier(), config=config)
    x = torch.randn(4 * steps, 10, device=engine.device)
    y = torch.zeros(4 * steps, dtype=torch.long, device=engine.device)
    maps = []
    for one, other in DataLoader(TensorDataset(x, y), batch_size=4):
        engine.backward(engine(one, other))
        engine.step()
        maps.append(memory_maps.count())
    assert engine.programs.compiling.steps == steps
    return maps


def main() -> None:
    kernel = memory_maps.limit()
    memory_maps.limit = lambda: PROGRAMS * memory_maps._OF_A_PROGRAM
    runtime.start()
    inherited = os.environ.get("XLA_COMPILATION_CACHE_SIZE")
    # Room for the tests of replays, which are about the cache's size only.
    memory_maps.limit = lambda: kernel
    found = {"inherited": inherited, "replays": replays()}
    bounded = slices(14)
    # The next programs reach three quarters of this.
    allowed = bounded[-1] * 10 // 9
    memory_maps.limit = lambda: allowed
    found |= {"bounded": bounded, "allowed": allowed, "emptied": slices(14)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
