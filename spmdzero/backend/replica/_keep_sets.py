"""Sets of what equal blocks may keep for backward, each with one more of what saves most for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from spmdzero.backend.replica._kept_by_name import CONTEXT, matching
from spmdzero.backend.replica._recomputed_blocks import equal_blocks

# Blocks of more are mixtures of experts, each of which some tokens go through.
_MOST_LAYERS = 12


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


@dataclass(frozen=True, kw_only=True)
class KeepSet:
    """Names of what stays of a block beside its input.

    Attributes:
        names: as ``"recompute": {"keep": names}`` has them.
        features: of all of them together, a token's numbers.
    """

    names: tuple[str, ...]
    features: int

    @property
    def policy(self) -> Mapping[str, list[str]]:
        """The value of ``"recompute"``."""
        return {"keep": [*self.names]}


def keep_sets(model: nn.Module, *, attends: bool, least: int = 0) -> Sequence[KeepSet]:
    """The sets, the smallest first; none where blocks have nothing of it.

    A byte of what a layer returns takes as many multiplications as it has inputs. The last layer is
    left out, whose output a block's backward seldom needs.

    Args:
        model: with equal blocks.
        attends: whether attention's output is in each.
        least: layers of fewer inputs are left out, as it takes longer to keep what they return.
    """
    layers = sorted(block_layers(model)[:-1], key=lambda layer: -layer.inputs)
    # Attention returns about as much as the block is given.
    kept = [(CONTEXT, layers[-1].inputs if layers else 1)] if attends else []
    kept += [(layer.name, layer.outputs) for layer in layers if layer.inputs >= least]
    return [
        KeepSet(names=tuple(name for name, _ in some), features=sum(size for _, size in some))
        for some in (kept[:end] for end in range(1, len(kept) + 1))
    ]


def block_layers(model: nn.Module) -> list[Layer]:
    """The layers in the order in which a block has them; none of mixtures of small modules.

    Subclasses are left out: torch's attention has one that it reads, and never calls.
    """
    found = [*_layers(model)]
    return found if len(found) <= _MOST_LAYERS else []


def _layers(model: nn.Module) -> Iterator[Layer]:
    blocks = [model.get_submodule(name) for name in equal_blocks(model)]
    kinds = {tuple(name for name, _ in block.named_modules() if name) for block in blocks}
    for path, part in blocks[0].named_modules() if blocks else ():
        if type(part) is not nn.Linear:
            continue
        names = (path.rpartition(".")[2], path)
        name = next((n for n in names if all(matching(kind, n) == [path] for kind in kinds)), None)
        if name is not None:
            yield Layer(path=path, name=name, inputs=part.in_features, outputs=part.out_features)
