"""Forms of tensors, and the parameters of a block that rest as shards."""

import dataclasses
from collections.abc import Mapping

import torch

from spmdzero.backend.replica import GatheredAtUse
from spmdzero.backend.replica._gathered import Shard


@dataclasses.dataclass(frozen=True)
class Form:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)


def shards_of(
    parameters: Mapping[str, torch.Tensor], gathered: GatheredAtUse | None
) -> dict[str, Shard]:
    """Names those of a block's parameters that rest as shards."""
    if gathered is None:
        return {}
    found = {name: gathered.shard_of(parameter) for name, parameter in parameters.items()}
    return {name: shard for name, shard in found.items() if shard is not None}
