"""Records what DeepSpeed 0.19.8's MoE makes of tokens: tests/data/experts.npz.

    python -m tests.oracle.experts

One process on gloo; it needs no spmdzero.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.oracle.alone import start_deepspeed

DATA = Path(__file__).parents[1] / "data" / "experts.npz"
WIDTH, EXPERTS, ROWS, LENGTH = 16, 4, 8, 12
# None of them draws random numbers.
LAYERS: Mapping[str, dict[str, Any]] = {
    "one": {"k": 1, "use_rts": False, "capacity_factor": 4.0},
    "one, none dropped": {"k": 1, "use_rts": False, "drop_tokens": False},
    "two": {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.6},
    "two, none dropped": {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
    "three": {"k": 3, "capacity_factor": 0.5, "min_capacity": 2},
    "residual": {"k": 1, "use_rts": False, "capacity_factor": 4.0, "use_residual": True},
}


class Expert(nn.Module):
    """An MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., WIDTH]` to the same."""
        return self.down(torch.relu(self.up(x)))


def layer(make: Callable[..., nn.Module], name: str) -> nn.Module:
    """The layer, whose experts differ."""
    torch.manual_seed(0)
    made = make(WIDTH, Expert(), num_experts=EXPERTS, **LAYERS[name])
    generator = torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def tokens() -> torch.Tensor:
    """`[ROWS, LENGTH, WIDTH]`."""
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.manual_seed(2))


def results(made: nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    """The output, the balancing loss, the counts, and the gradients of all weights."""
    output, l_aux, counts = made(x)
    (output.square().mean() + 0.01 * l_aux).backward()
    found = {"output": output, "l_aux": l_aux, "counts": counts}
    found |= {f"grad/{n}": p.grad for n, p in made.named_parameters() if p.grad is not None}
    return {name: value.detach().numpy() for name, value in found.items()}


def main() -> None:
    """Writes the file."""
    start_deepspeed(port=29578)
    from deepspeed.moe.layer import MoE

    found: dict[str, Any] = {}
    for name in LAYERS:
        made = layer(MoE, name)
        made.set_deepspeed_parallelism()  # type: ignore[operator]
        for key, value in results(made, tokens()[0]).items():
            found[f"{name}/{key}"] = value
    np.savez_compressed(DATA, **found)


if __name__ == "__main__":
    main()
