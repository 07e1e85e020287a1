"""Prints what DeepSpeed 0.19.8 trains of the pipeline of tests/engine/test_pipeline_module.py.

    python -m tests.oracle.pipeline

One process on gloo, one stage; it needs no spmdzero.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.oracle.alone import start_deepspeed

VOCABULARY, WIDTH, LENGTH = 64, 32, 8
MICRO_BATCHES, STEPS = 2, 4


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


def layers_of(layer: Any, tied_layer: Any) -> list[Any]:
    """The layers, by DeepSpeed's `LayerSpec` and `TiedLayerSpec`, or ours."""
    return [
        tied_layer("table", Table, VOCABULARY, WIDTH),
        *[layer(Block, WIDTH) for _ in range(4)],
        nn.LayerNorm(WIDTH),
        lambda x: x * 2,
        tied_layer("table", Table, VOCABULARY, WIDTH, forward_fn=scores),
    ]


def main() -> None:
    """Trains and evaluates."""
    start_deepspeed(port=29577)
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    layers = layers_of(LayerSpec, TiedLayerSpec)
    model = PipelineModule(layers, num_stages=1, loss_fn=loss_of)
    adamw = {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    engine = deepspeed.initialize(
        model=model, config=config, model_parameters=list(model.parameters())
    )[0]
    batches = pairs(STEPS * MICRO_BATCHES)
    print([engine.train_batch(batches).item() for _ in range(STEPS)])
    print(engine.eval_batch(pairs(MICRO_BATCHES, seed=3)).item())


if __name__ == "__main__":
    main()
