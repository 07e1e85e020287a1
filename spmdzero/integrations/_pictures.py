"""Pictures that stand in a batch one after the other, given to the devices of their rows.

Models such as Qwen-VL take the patches of all pictures of a batch as one tensor, and
`image_grid_thw` says how many each picture has. Neither has as many rows as the batch.
"""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmdzero._logging import is_new
from spmdzero.backend import Batch

logger = logging.getLogger("spmdzero")
_KINDS, _IMAGE = "mm_token_type_ids", 1
_GRIDS = "image_grid_thw"
_PICTURES = ("pixel_values", _GRIDS)
_FILMS = ("pixel_values_videos", "video_grid_thw")


def with_pictures(module: nn.Module, kwargs: Mapping[str, Any], *, replicas: int) -> dict[str, Any]:
    """The inputs of a forward, with patches, grids and positions marked as the rows' own."""
    owner = _owner_of_positions(module, kwargs)
    if owner is None:
        return dict(kwargs)
    given = _given(_positioned(owner, kwargs))
    packed = _packed(given)
    shared = _are_alike(owner, given, replicas)
    if not shared and replicas > 1 and is_new(("pictures", "unshared")):
        logger.warning(
            "the pictures of a batch have other sizes on each device, for which one program can't "
            "be compiled: each device computes all rows, which is right and as slow as one device. "
            "Let the processor make all pictures of one size (max_pixels = min_pixels, pictures of "
            "one shape), with as many in each row"
        )
    for name in packed:
        given[name] = Batch(given[name], 0, shared)
    # [3, rows, length].
    if given["position_ids"].dim() == 3:
        given["position_ids"] = Batch(given["position_ids"], 1, shared)
    return dict(kwargs) | given


def with_positions(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a forward with pictures, and the positions that the model would compute.

    It reads each row's kinds of tokens by Python, which can't differ between replicas, and takes
    long where each read is one of the devices.
    """
    owner = _owner_of_positions(module, kwargs)
    return dict(kwargs) if owner is None else _positioned(owner, kwargs)


def _positioned(owner: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = _given(kwargs)
    if "position_ids" in given:
        return dict(kwargs)
    takes = inspect.signature(owner.get_rope_index).parameters
    positions, _ = owner.get_rope_index(**{n: v for n, v in given.items() if n in takes})
    return dict(kwargs) | {"position_ids": positions}


def _given(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}


def _packed(given: Mapping[str, Any]) -> list[str]:
    return [name for name in (*_PICTURES, *_FILMS) if name in given]


def _owner_of_positions(module: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """The submodule that computes positions; None if there are no pictures on the host."""
    given = _given(kwargs)
    packed = _packed(given)
    needed = [given[name] for name in ("input_ids", _KINDS, *packed) if name in given]
    if not packed or _KINDS not in given or not _on_host(needed):
        return None
    # Of the class: a module may answer for any name with an error of its own.
    owned = (each for each in module.modules() if hasattr(type(each), "get_rope_index"))
    return next(owned, None)


def _are_alike(owner: Any, given: Mapping[str, Any], replicas: int) -> bool:
    """Whether the rows of each device have pictures of the same sizes, in the same order."""
    kinds, grids = given[_KINDS], given.get(_GRIDS)
    if grids is None or any(name in given for name in _FILMS) or len(kinds) % replicas:
        return False
    if len(grids) % replicas:
        return False
    parts = grids.unflatten(0, (replicas, -1))
    if not (parts == parts[:1]).all():
        return False
    of_devices = (kinds == _IMAGE).unflatten(0, (replicas, -1)).flatten(1).sum(1)
    merged = owner.config.vision_config.spatial_merge_size**2
    return bool((of_devices == parts[0].prod(1).sum() // merged).all())


def _on_host(tensors: list[Any]) -> bool:
    return all(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in tensors)
