"""Losses of a GPT of 10 M parameters in fp32, bf16, and with 8 bits, on one picture.

python tests/benchmarks/loss_curves.py                  500 steps each: 15 minutes on two cores
python tests/benchmarks/loss_curves.py --steps 20 --picture /tmp/few.png

Trains on the source of Python's standard library, on two virtual devices. Prints a table of the
last losses and draws a picture of all.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Before what a script's own folder would hide.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from harness.workload import GPT, SIZES
from source_text import SourceText, Windows

import spmdzero

PICTURE = Path(__file__).resolve().parents[2] / "out" / "fewer_bits.png"
SIZE = dataclasses.replace(SIZES["gpt-10m"], sequence=64)
ROWS, LEARNING_RATE = 4, 1e-3
LAST = 50
"""Steps of whose losses the mean is taken, at the end."""
_BF16 = {"bf16": {"enabled": True}}
WAYS: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": _BF16,
    "fp8, tensorwise": {**_BF16, "spmd": {"products": {"dtype": "fp8", "skip": ["head"]}}},
    "fp8, rowwise": {
        **_BF16, "spmd": {"products": {"dtype": "fp8", "recipe": "rowwise", "skip": ["head"]}},
    },
    "int8, rowwise": {**_BF16, "spmd": {"products": {"dtype": "int8", "skip": ["head"]}}},
    "weights cross in int8": {
        **_BF16, "zero_optimization": {"stage": 3, "zero_quantized_weights": True},
    },
}  # fmt: skip


def main() -> None:
    """Trains each way, prints the table and draws the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    asked = parser.parse_args()
    # transformers would import torch_xla where it is installed.
    os.environ |= {"CPU_NUM_DEVICES": "2", "SPMDZERO_BACKEND": "jax", "USE_TORCH_XLA": "false"}
    text = SourceText.read(vocabulary=SIZE.vocabulary).trained
    curves = {}
    print("| | mean loss of the last steps | above fp32's |\n|---|---:|---:|", flush=True)
    for name, config in WAYS.items():
        start = time.monotonic()
        curves[name] = losses(config, text, steps=asked.steps)
        own, plain = (statistics.mean(curves[each][-LAST:]) for each in (name, "fp32"))
        print(f"| {name} | {own:.4f} | {100 * (own / plain - 1):+.2f} % |", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    draw(curves, asked.picture)


def losses(config: dict[str, Any], text: torch.Tensor, *, steps: int) -> list[float]:
    """The loss of each step; every way sees the same rows, and begins with the same weights."""
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(
        model=GPT(SIZE),
        config={
            "train_batch_size": ROWS, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}}, **config,
        },
    )  # fmt: skip
    windows = Windows(text, SIZE.sequence)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))
    found = []
    for step in range(steps):
        rows = [windows[int(i)] for i in order[ROWS * step : ROWS * (step + 1)]]
        loss = engine(*map(torch.stack, zip(*rows, strict=True)))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def draw(curves: Mapping[str, list[float]], path: Path) -> None:
    """A picture of the curves, each a mean over neighbouring steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        few = max(1, len(curve) // 50)
        means = [statistics.mean(curve[i : i + few]) for i in range(0, len(curve), few)]
        axes.plot([few * (i + 0.5) for i in range(len(means))], means, label=name, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
