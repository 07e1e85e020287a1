"""Records what torchao computes of linear layers in 8 bits: tests/data/eight_bits.npz.

    pip install --no-deps --target somewhere torchao==0.14.1
    PYTHONPATH=somewhere python -m tests.oracle.eight_bits

It needs no spmdzero: the layer and its inputs are those of `layer`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

DATA = Path(__file__).parents[1] / "data" / "eight_bits.npz"
RECIPES = ("tensorwise", "rowwise")


def layer(seed: int = 0) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer, its input `[2, 24, 128]`, and the gradient of its output; all fp32."""
    torch.manual_seed(seed)
    linear = nn.Linear(128, 256)
    x, grad = torch.randn(2, 24, 128), torch.randn(2, 24, 256)
    # Rows and columns of different sizes, as activations have them.
    x[0, 3] *= 30.0
    x[..., 5] *= 20.0
    grad[1, 7] *= 1e-3
    return linear, x.requires_grad_(), grad


def results(linear: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a layer returns, and the gradients, of the weight's by 16 of its outputs."""
    made = linear(x)
    made.backward(grad)
    assert x.grad is not None
    own = dict(linear.named_parameters())
    assert own["weight"].grad is not None
    return {"output": made.detach(), "by_input": x.grad, "by_weight": own["weight"].grad[:16]}


def main() -> None:
    """Writes the file."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise

    found: dict[str, Any] = {}
    for recipe in RECIPES:
        linear, x, grad = layer()
        config = Float8LinearConfig.from_recipe_name(recipe)
        # On a CPU, products of the numbers that the cast has left.
        config = dataclasses.replace(config, emulate=True)
        converted = convert_to_float8_training(nn.Sequential(linear), config=config)
        for name, tensor in results(converted[0], x, grad).items():
            found[f"fp8/{recipe}/{name}"] = tensor.numpy()
    linear, x, _ = layer()
    for name, tensor in (("input", x.flatten(0, 1)), ("weight", linear.weight)):
        few, scale = quantize_int8_rowwise(tensor.detach())
        found[f"int8/{name}"], found[f"int8/{name}/scale"] = few.numpy(), scale.numpy()
    np.savez_compressed(DATA, **found)


if __name__ == "__main__":
    main()
