"""Sets of what a block may keep for its backward, each with one more of what saves most for it."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from spmdzero.backend.replica._candidates import candidates

CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer that every equal block has.

    Attributes:
        name: in its block, the last part of it where that is enough.
        inputs, outputs: features. A byte of what it returns is `inputs` multiplications.
    """

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
    """The sets, the smallest first; none where blocks have no linear layers.

    Args:
        model: with equal blocks, of which each is to have what is named.
        attends: whether attention's output is in each.
        least: layers of fewer inputs are left out, as it takes longer to keep what they return.
    """
    layers = sorted(_layers(model), key=lambda layer: -layer.inputs)
    layers = [layer for layer in layers if layer.inputs >= least]
    if not layers:
        return []
    # Attention returns about as much as the block is given.
    kept = [(CONTEXT, layers[-1].inputs)] if attends else []
    kept += [(layer.name, layer.outputs) for layer in layers]
    return [
        KeepSet(names=tuple(name for name, _ in some), features=sum(size for _, size in some))
        for some in (kept[:end] for end in range(1, len(kept) + 1))
    ]


def _layers(model: nn.Module) -> Iterator[Layer]:
    """The layers but the last of each block, whose output its backward seldom needs."""
    places = candidates(model, fewest=2)
    firsts = [
        module
        for module in model.modules()
        if (place := places.get(id(module))) is not None and place.place == 0
    ]
    if not firsts:
        return
    linear = [
        {name: part for name, part in block.named_modules() if isinstance(part, nn.Linear)}
        for block in firsts
    ]
    tails = collections.Counter(name.rpartition(".")[2] for name in linear[0])
    for name, part in [*linear[0].items()][:-1]:
        tail = name.rpartition(".")[2]
        if all(name in others for others in linear):
            short = tail if tails[tail] == 1 else name
            yield Layer(name=short, inputs=part.in_features, outputs=part.out_features)
