"""Values for a batch of which only the shapes are known."""

from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.backend import Replicated, map_tensors


def made_up(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor, the same at each call: normal draws, or zeros, which are valid indices."""
    if dtype.is_floating_point:
        generator = torch.Generator("cpu").manual_seed(0)
        return torch.randn(tuple(shape), generator=generator, device="cpu").to(dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu")


def with_values(batch: Any) -> Any:
    """`batch` with a `made_up` tensor in the place of each that is on the meta device."""

    def fill(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Replicated):
            return Replicated(fill(_, leaf.tensor))
        return made_up(leaf.shape, leaf.dtype) if leaf.is_meta else leaf

    return map_tensors(batch, fill)
