"""Sets of what a block may keep for its backward, each with one more of what saves most for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from spmdzero.backend.replica._block_layers import block_layers

CONTEXT = "context"


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
