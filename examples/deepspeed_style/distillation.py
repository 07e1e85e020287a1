"""Distils a wide teacher into a small student, written for DeepSpeed: two engines, own losses.

    spmdzero run --devices 2 examples/deepspeed_style/distillation.py

With `import deepspeed` instead it runs under DeepSpeed's launcher, and trains the same models.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import spmdzero as deepspeed

TEMPERATURE = 2.0
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def load_data() -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    # A multiple of every usual global batch, so that no micro-batch of an epoch is short.
    return TensorDataset(images[:1536], torch.tensor(digits.target)[:1536])


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distils one classifier into another.")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument("--epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    return parser.parse_args()


def train(name: str, model: nn.Module, loss_of: Loss, *, args: argparse.Namespace):
    """An engine that has trained `model` for `args.epochs` epochs."""
    # The optimizer is the script's own, and the schedule is made from DeepSpeed's.
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    engine, _, loader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda wrapped: torch.optim.lr_scheduler.StepLR(wrapped, 12, gamma=0.5),
        training_data=load_data(),
        config=args.deepspeed_config,
    )
    for _ in range(args.epochs):
        engine.train()
        for images, labels in loader:
            images, labels = images.to(engine.device), labels.to(engine.device)
            loss = loss_of(engine(images), images, labels)
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            deepspeed.comm.all_reduce(mean)
            value = mean.item() / deepspeed.comm.get_world_size()
            if deepspeed.comm.get_rank() == 0:
                print(
                    f"{name} step {engine.global_steps} loss {value:.6f} "
                    f"lr {scheduler.get_last_lr()[0]:.6e} "
                    f"norm {engine.get_global_grad_norm():.5f}",
                    flush=True,
                )
    return engine


def main() -> None:
    args = parse()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    teacher = train(
        "teacher",
        mlp(256),
        lambda logits, images, labels: F.cross_entropy(logits, labels),
        args=args,
    )
    teacher.eval()

    def distil(logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(teacher(images) / TEMPERATURE, dim=-1)
        guessed = F.log_softmax(logits / TEMPERATURE, dim=-1)
        soft = F.kl_div(guessed, wanted, reduction="batchmean") * TEMPERATURE**2
        return 0.7 * soft + 0.3 * F.cross_entropy(logits, labels)

    train("student", mlp(32), distil, args=args)


if __name__ == "__main__":
    main()
