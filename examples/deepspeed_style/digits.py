"""Classifies scikit-learn's digits, written for DeepSpeed: parameter groups, accumulation.

    spmdzero run --devices 2 examples/deepspeed_style/digits.py

With `import deepspeed` instead it runs under DeepSpeed's launcher, and trains the same model.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import spmdzero as deepspeed

TRAIN = 1536


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    # 256 test images: ranks and devices can share them equally.
    test = slice(TRAIN, TRAIN + 256)
    return TensorDataset(images[:TRAIN], labels[:TRAIN]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def parameter_groups(model: nn.Module) -> list[dict]:
    """Matrices and kernels decay; biases and norms do not."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_loader(data: TensorDataset, *, rows: int, shuffle: bool) -> DataLoader:
    sampler = DistributedSampler(
        data,
        num_replicas=deepspeed.comm.get_world_size(),
        rank=deepspeed.comm.get_rank(),
        shuffle=shuffle,
    )
    return DataLoader(data, batch_size=rows, sampler=sampler, drop_last=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small conv net on digits.")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument("--epochs", type=int, default=3)
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    return parser.parse_args()


def sum_over_ranks(value: Tensor) -> float:
    total = value.detach().float().clone()
    deepspeed.comm.all_reduce(total)
    return total.item()


def accuracy(engine, loader: DataLoader) -> float:
    engine.eval()
    correct, seen = torch.zeros((), device=engine.device), 0
    with torch.no_grad():
        for images, labels in loader:
            guesses = engine(images.to(engine.device)).argmax(dim=-1)
            correct += (guesses == labels.to(engine.device)).sum()
            seen += len(labels)
    return sum_over_ranks(correct) / (seen * deepspeed.comm.get_world_size())


def main() -> None:
    args = parse()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    train_data, test_data = load_data()
    model = build_model()
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=parameter_groups(model)
    )
    world, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
    accumulate = engine.gradient_accumulation_steps()
    # The rows of one process, which has one GPU under DeepSpeed.
    rows = engine.train_batch_size() // accumulate // world
    train_loader = make_loader(train_data, rows=rows, shuffle=True)
    test_loader = make_loader(test_data, rows=rows, shuffle=False)
    for epoch in range(args.epochs):
        engine.train()
        train_loader.sampler.set_epoch(epoch)
        running = 0.0
        for images, labels in train_loader:
            logits = engine(images.to(engine.device))
            loss = F.cross_entropy(logits, labels.to(engine.device))
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            running += sum_over_ranks(loss) / world / accumulate
            if boundary:
                if rank == 0:
                    print(
                        f"step {engine.global_steps} loss {running:.6f} "
                        f"lr {scheduler.get_last_lr()[0]:.6e} "
                        f"norm {engine.get_global_grad_norm():.5f}",
                        flush=True,
                    )
                running = 0.0
        score = accuracy(engine, test_loader)
        if rank == 0:
            decays = [group["weight_decay"] for group in optimizer.param_groups]
            print(f"epoch {epoch}: test accuracy {score:.4f}, weight decays {decays}", flush=True)


if __name__ == "__main__":
    main()
