"""Modules that may be equal blocks, found without running them."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import nn

from spmdzero.backend._current import current
from spmdzero.backend.forms._tree import Skeleton, UnknownContentError
from spmdzero.backend.pure import ImpureError

FEWEST = 4
"""Fewest blocks for a loop: it saves little with less, as one forward and backward are compiled."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A module that may be one of several equal blocks.

    Attributes:
        series: the number of its row of blocks.
        place: its place in the row.
        name: of the module that holds the row.
    """

    series: int
    place: int
    name: str


def candidates(model: nn.Module, *, fewest: int = FEWEST) -> dict[int, Candidate]:
    """Maps a module's id to its candidate.

    Candidates are children of a ModuleList or Sequential that follow each other, of one class, with
    equal names, shapes and dtypes of parameters and buffers.
    """
    found: dict[int, Candidate] = {}
    series = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        for form, row in itertools.groupby(module, key=_form):
            blocks = list(row)
            if len(blocks) < fewest or not form[1]:
                continue
            series += 1
            for place, block in enumerate(blocks):
                found.setdefault(id(block), Candidate(series, place, name))
    return found


def _form(block: nn.Module) -> tuple[Any, ...]:
    def of(named: Any) -> tuple[Any, ...]:
        return tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in named)

    return type(block), of(block.named_parameters()), of(block.named_buffers()), block.training


def has_hooks(block: nn.Module) -> bool:
    """Whether a call of `block` runs hooks beside its forward."""
    return any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        for part in block.modules()
    )


def surroundings() -> tuple[Any, ...]:
    """The settings that influence a block's output beside its inputs."""
    device = current().device_type
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
    )


class NotALoopError(ImpureError):
    """A block can't be the body of a loop; the text is a clause that says why."""


def taken_apart(tree: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """Returns what a block takes or returns, without its tensors, and the tensors.

    Raises:
        NotALoopError: a part of `tree` may change from call to call.
    """
    try:
        return Skeleton.of(tree)
    except UnknownContentError as error:
        raise NotALoopError(f"a block takes or returns {error}") from None
