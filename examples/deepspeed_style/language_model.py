"""A byte-level language model, written for DeepSpeed: ZeRO-2, the schedule from the JSON.

    spmdzero run --devices 2 examples/deepspeed_style/language_model.py

With `import deepspeed` instead it runs under DeepSpeed's launcher, and trains the same model.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import spmdzero as deepspeed

VOCABULARY, WINDOW, WIDTH, HEADS, LAYERS = 256, 32, 64, 4, 2


class Windows(Dataset):
    """Consecutive windows of the Python standard library's source: its bytes and the next ones."""

    def __init__(self, size: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.size = min(size, (len(self.bytes) - 1) // WINDOW)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * WINDOW
        return self.bytes[start : start + WINDOW], self.bytes[start + 1 : start + 1 + WINDOW]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            part.view(batch, seq, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a byte-level language model.")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument("--steps", type=int, default=30)
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    return parser.parse_args()


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    deepspeed.comm.all_reduce(total)
    return total.item() / deepspeed.comm.get_world_size()


def main() -> None:
    args = parse()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LanguageModel()
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    # The rows of one process, which has one GPU under DeepSpeed.
    rows = engine.train_batch_size() // engine.gradient_accumulation_steps() // world
    data = Windows(4096)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=rows, sampler=sampler, drop_last=True)
    engine.train()
    epoch = 0
    while engine.global_steps < args.steps:
        sampler.set_epoch(epoch)
        for tokens, targets in loader:
            tokens, targets = tokens.to(engine.device), targets.to(engine.device)
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            mean = mean_over_ranks(loss)
            if rank == 0:
                print(
                    f"step {engine.global_steps} loss {mean:.6f} lr {engine.get_lr()[0]:.6e} "
                    f"norm {engine.get_global_grad_norm():.5f}",
                    flush=True,
                )
            if engine.global_steps == args.steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
