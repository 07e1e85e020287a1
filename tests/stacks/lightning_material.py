"""Writes a text and pictures as WikiText-2 and MNIST, which Lightning's examples download."""

import random
import struct
from pathlib import Path

import torch


def write_text(folder: Path) -> None:
    """Writes what `lightning.pytorch.demos.WikiText2` would download: words that count up."""
    draw, words = random.Random(0), [f"w{index}" for index in range(60)]
    lines = []
    for _ in range(300):
        start, count = draw.randrange(60), draw.randrange(8, 30)
        lines.append(" ".join(words[(start + index) % 60] for index in range(count)))
    folder.mkdir(parents=True)
    (folder / "wikitext-2.txt").write_text("\n".join(lines) + "\n")


def write_digits(folder: Path, *, train: int, test: int) -> None:
    """Writes what torchvision's MNIST would download: a noisy picture of its own for each digit."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    digits = torch.randint(0, 200, (10, 28, 28), generator=draw)
    for part, count in (("train", train), ("t10k", test)):
        labels = torch.randint(0, 10, (count,), generator=draw)
        noise = torch.randint(0, 56, (count, 28, 28), generator=draw)
        # The head of a file: what it holds, and how many.
        images = struct.pack(">IIII", 2051, count, 28, 28)
        images += (digits[labels] + noise).to(torch.uint8).numpy().tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        numbers = struct.pack(">II", 2049, count) + labels.to(torch.uint8).numpy().tobytes()
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(numbers)
