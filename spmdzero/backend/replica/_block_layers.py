"""The linear layers of equal blocks, by names that a policy of recomputation takes."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from spmdzero.backend.replica._kept_by_name import matching
from spmdzero.backend.replica._recomputed_blocks import equal_blocks


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer that all equal blocks have.

    Attributes:
        path: its name in a block.
        name: names it alone in each block: the last part of `path` where that is enough.
        inputs, outputs: features.
    """

    path: str
    name: str
    inputs: int
    outputs: int


# Blocks of more are mixtures of experts, each of which some tokens go through.
_MOST = 12


def block_layers(model: nn.Module) -> list[Layer]:
    """The layers in the order in which a block has them; none of mixtures of small modules.

    Subclasses are left out: torch's attention has one that it reads, and never calls.
    """
    found = [*_layers(model)]
    return found if len(found) <= _MOST else []


def _layers(model: nn.Module) -> Iterator[Layer]:
    blocks = [model.get_submodule(name) for name in equal_blocks(model)]
    kinds = {tuple(name for name, _ in block.named_modules() if name) for block in blocks}
    first = blocks[0].named_modules() if blocks else ()
    for path, part in first:
        if type(part) is not nn.Linear:
            continue
        for name in (path.rpartition(".")[2], path):
            if all(matching(names, name) == [path] for names in kinds):
                yield Layer(
                    path=path, name=name, inputs=part.in_features, outputs=part.out_features
                )
                break
