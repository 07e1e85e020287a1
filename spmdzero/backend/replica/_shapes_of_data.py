"""Operations whose shape depends on data, with the shape that all replicas share.

A compiled program has one shape for all replicas. So the number of elements that a mask chooses
is read, and which they are is computed on the devices, where replicas may differ.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from spmdzero.backend._current import arrays
from spmdzero.backend.forms._masks import by_places, has_masks, is_mask
from spmdzero.errors import ReplicaRegionError

_aten = torch.ops.aten
# Of the loss only what its gradient needs has a shape of the data's, which a backend that has it
# pads; and an index by numbers has their shape.
_STATIC = {_aten._ctc_loss.default, _aten._ctc_loss.Tensor, _aten.index.Tensor}
_Read = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Indexing:
    """An operation by integer indices in the place of one by masks."""

    func: Any
    args: tuple[Any, ...]


def has_one(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operation's shape depends on the values of `args`."""
    return has_masks(func, args) or _is_dynamic(func)


def gives_one(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether its result's shape does; what is written through a mask has a shape of its own."""
    return _is_dynamic(func) or (func is _aten.index.Tensor and has_masks(func, args))


@functools.cache
def _is_dynamic(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags and func not in _STATIC


def made_static(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, read: _Read, upload: _Read
) -> Any:
    """The operation as `Indexing`, or its result where no gradient passes through it.

    Args:
        read: the value that all replicas share, on the CPU; raises where they disagree.
        upload: maps a CPU tensor to every replica's copy.

    Raises:
        ReplicaRegionError: replicas have different shapes.
    """
    if has_masks(func, args) and any(is_mask(index) and not index.dim() for index in args[1]):
        raise ReplicaRegionError("a mask without dims chooses all or nothing")
    if has_masks(func, args) or func is _aten.masked_select.default:
        return Indexing(*by_places(func, args, lambda mask, size: _places(mask.expand(size), read)))
    if func is _aten.nonzero.default and args[0].dim():
        return torch.stack(_places(args[0] != 0, read), 1)
    # Of numbers that all replicas share, such as lengths.
    on_host = [read(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    made = func(*on_host, **kwargs)
    return upload(made) if isinstance(made, torch.Tensor) else tuple(map(upload, made))


def named(func: Any, args: tuple[Any, ...]) -> str:
    """Says that replicas have different shapes, and the way out."""
    if has_masks(func, args):
        return (
            f"{func} with a boolean mask has a shape that depends on data, and replicas have "
            "different ones. Use torch.where or masked_fill"
        )
    return (
        f"the shape of {func} depends on data, and replicas have different ones, which a compiled "
        "program can't have. Use torch.where, masked_fill, or a fixed number of elements"
    )


def _places(mask: torch.Tensor, read: _Read) -> list[torch.Tensor]:
    """The indices of the elements where `mask` is true, one tensor for each of its dims."""
    flat = mask.reshape(-1) != 0
    chosen = flat.sum()
    count = int((read(chosen) if arrays.is_mine(chosen) else chosen).item())
    # A stable order puts what isn't chosen behind.
    place = torch.sort((~flat).to(torch.int32), stable=True).indices[:count]
    places: list[torch.Tensor] = []
    for size in reversed(mask.shape):
        places.insert(0, place % size)
        place = place // size
    return places


def remedy_of_transformers() -> str:
    """Names the argument that avoids the running line, with a space before it; empty if none does.

    A head that asks which labels are there does so for want of a `problem_type`; a mask is one
    form of `logits_to_keep` of several.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("transformers."):
            return _remedy(frame.f_locals, names=frame.f_code.co_names)
        frame = frame.f_back
    return ""


def _remedy(local: dict[str, Any], *, names: tuple[str, ...]) -> str:
    config = getattr(local.get("self"), "config", None)
    if "problem_type" in names and getattr(config, "problem_type", "") is None:
        return (
            ". Here the model asks which rows have a label, as its problem_type is None. Set "
            'model.config.problem_type = "single_label_classification" (or "regression", '
            '"multi_label_classification"); single labels of -100 are left out'
        )
    kept = local.get("logits_to_keep")
    if isinstance(kept, torch.Tensor) and kept.dtype == torch.bool:
        return (
            ". In place of the mask, give logits_to_keep integers [rows, positions], as many in "
            "each row, or leave it out and give the label -100 where the mask is False"
        )
    return ""
