"""Records optimizer states in 8 bits by bitsandbytes: tests/data/eight_bit_states.npz.

    pip install --no-deps --target somewhere bitsandbytes==0.50.2
    PYTHONPATH=somewhere python -m tests.oracle.eight_bit_states

It needs no spmdzero: weights and gradients are those of `weight` and `gradient`. States are coded
by bitsandbytes' code for any device; that of its CPU alone is coarse below 2e-5 of a block's scale.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).parents[1] / "data" / "eight_bit_states.npz"
SHAPE = (64, 256)
STEPS = 6
PARAMS = {"lr": 1e-2, "weight_decay": 0.1}
OPTIMIZERS = ("AdamW8bit", "Adam8bit", "Lion8bit")


def weight() -> torch.Tensor:
    """The weight before the first step, fp32 `[*SHAPE]`."""
    return torch.randn(SHAPE, generator=torch.manual_seed(0))


def gradient(step: int) -> torch.Tensor:
    """The gradient of a step, fp32 `[*SHAPE]`: rows and elements are of many sizes."""
    generator = torch.manual_seed(100 + step)
    sizes = torch.exp(2 * torch.randn(SHAPE, generator=torch.manual_seed(1)))
    return torch.randn(SHAPE, generator=generator) * sizes


def values(*, signed: bool) -> torch.Tensor:
    """Numbers to be coded, `[3, 300]`."""
    generator = torch.manual_seed(7)
    found = torch.randn(3, 300, generator=generator)
    found = found * torch.exp(3 * torch.randn(3, 300, generator=generator))
    found[1, 44:] = 0.0
    return found if signed else found.square()


def main() -> None:
    """Writes the file."""
    import bitsandbytes as bnb
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.functional import create_dynamic_map

    def portable(a: torch.Tensor, code: torch.Tensor, block: int) -> tuple[Any, Any]:
        size = a.reshape(-1, block).abs().amax(-1)
        scaled = (a.reshape(-1, block) * (1 / size.clamp(min=1e-38))[:, None]).clamp(-1, 1)
        bounds = (code[:-1] + code[1:]) / 2
        return torch.bucketize(scaled, bounds).to(torch.uint8).reshape(a.shape), size

    def coded(a: Any, code: Any, size_out: Any, out: Any, block: int) -> None:
        codes, size = portable(a, code, block)
        out.copy_(codes)
        size_out.copy_(size)

    ops._quant_blockwise_fp32_direct = coded
    found: dict[str, Any] = {}
    for signed in (True, False):
        found[f"table/{signed}"] = create_dynamic_map(signed=signed).numpy()
    for name in OPTIMIZERS:
        parameter = torch.nn.Parameter(weight())
        optimizer = getattr(bnb.optim, name)([parameter], **PARAMS)
        for step in range(STEPS):
            parameter.grad = gradient(step)
            optimizer.step()
        found[f"{name}/weight"] = parameter.detach().numpy()
        for key in ("state1", "state2", "absmax1", "absmax2"):
            if key in optimizer.state[parameter]:
                found[f"{name}/{key}"] = optimizer.state[parameter][key].numpy()
    np.savez_compressed(DATA, **found)


if __name__ == "__main__":
    main()
