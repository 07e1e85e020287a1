"""Prints what DeepSpeed 0.19.8 trains of the pipeline of tests/engine/test_pipeline_module.py.

    python -m tests.oracle.pipeline
    python -m tests.oracle.pipeline checkpoint

One process on gloo, one stage. The second command writes
tests/data/deepspeed_checkpoints/pipeline, of a smaller one in two processes, two stages, and the
losses of the steps after it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.oracle.alone import start_deepspeed
from tests.support.deepspeed import run_ranks

VOCABULARY, WIDTH, LENGTH = 64, 32, 8
MICRO_BATCHES, STEPS = 2, 4
NARROW, STAGES, SAVED_AFTER = 16, 2, 2
ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "data" / "deepspeed_checkpoints" / "pipeline"


class Table(nn.Embedding):
    """Rows of a table for tokens."""


def scores(table: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The table as a head."""
    return nn.functional.linear(hidden, table.weight)


class Block(nn.Module):
    """An MLP beside what it takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and what the MLP makes of it."""
        return x + self.down(torch.tanh(self.up(x)))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pairs(count: int, *, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of 8 rows: tokens, and the next ones."""
    generator = torch.manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)
        yield tokens, tokens.roll(-1, 1)


def layers_of(layer: Any, tied_layer: Any, *, width: int = WIDTH) -> list[Any]:
    """The layers, by DeepSpeed's `LayerSpec` and `TiedLayerSpec`, or ours."""
    return [
        tied_layer("table", Table, VOCABULARY, width),
        *[layer(Block, width) for _ in range(4)],
        nn.LayerNorm(width),
        lambda x: x * 2,
        tied_layer("table", Table, VOCABULARY, width, forward_fn=scores),
    ]


def config_of(*, micro: int) -> dict[str, Any]:
    """The JSON, for `micro` rows of each rank."""
    adamw = {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}
    return {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
    }  # fmt: skip


def main() -> None:
    """Trains and evaluates."""
    start_deepspeed(port=29577)
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    layers = layers_of(LayerSpec, TiedLayerSpec)
    model = PipelineModule(layers, num_stages=1, loss_fn=loss_of)
    engine = deepspeed.initialize(
        model=model, config=config_of(micro=8), model_parameters=list(model.parameters())
    )[0]
    batches = pairs(STEPS * MICRO_BATCHES)
    print([engine.train_batch(batches).item() for _ in range(STEPS)])
    print(engine.eval_batch(pairs(MICRO_BATCHES, seed=3)).item())


def stage() -> None:
    """Trains one of the stages, saves, and prints the losses after it."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = layers_of(LayerSpec, TiedLayerSpec, width=NARROW)
    model = PipelineModule(layers, num_stages=STAGES, loss_fn=loss_of)
    engine = deepspeed.initialize(
        model=model, config=config_of(micro=8), model_parameters=list(model.parameters())
    )[0]
    batches = pairs(STEPS * MICRO_BATCHES)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            engine.save_checkpoint(CHECKPOINT, tag="saved")
        losses.append(engine.train_batch(batches).item())
    print(json.dumps(losses[SAVED_AFTER:]))


def record() -> None:
    """Starts the stages, and writes the losses after the checkpoint."""
    asked = ["-m", "tests.oracle.pipeline", "stage"]
    said = run_ranks(asked, ranks=STAGES, cwd=ROOT, timeout=600, DS_ACCELERATOR="cpu")
    (CHECKPOINT / "losses.json").write_text(said[0].splitlines()[-1] + "\n")
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        (CHECKPOINT / name).unlink(missing_ok=True)


if __name__ == "__main__":
    {"checkpoint": record, "stage": stage}.get(sys.argv[-1], main)()
