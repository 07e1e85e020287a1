"""Weights as plain torch state dicts: `pytorch_model.bin`, in several files if it is large."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._files import write_whole
from spmdzero.formats.export._shards import bytes_of, in_shards, total_bytes
from spmdzero.formats.export._weights import Weights

_SUFFIXES = (".bin", ".pt", ".pth")


def write_state_dict(
    weights: Weights, target: Path, *, max_shard_size: int | str = "5GB"
) -> list[Path]:
    """Writes what `torch.load(weights_only=True)` reads and `load_state_dict` takes.

    Tied parameters are in it under each of their names, as one tensor.

    Args:
        weights: what to write.
        target: one file, if it is called so (``.bin``, ``.pt``, ``.pth``); else a folder for
            `pytorch_model.bin`, or several files and `pytorch_model.bin.index.json`, the names
            that `transformers` loads.
        max_shard_size: of a file in a folder, which is also what is in memory at a time.

    Returns the files with tensors, in order.

    Raises:
        SpmdZeroUsageError: a size that can't be read.
        OSError: no space, no permission, ...
    """
    if target.suffix in _SUFFIXES:
        save_whole(weights.state_dict(), target)
        return [target]
    shards = in_shards(weights.tensors, bytes_of(max_shard_size))
    files: list[Path] = []
    place: dict[str, str] = {}
    for index, names in enumerate(shards):
        part = f"-{index + 1:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = target / f"pytorch_model{part}.bin"
        chosen = {name: weights.tensors[name] for name in names}
        tied = {alias: name for alias, name in weights.tied.items() if name in chosen}
        content = Weights(tensors=chosen, tied=tied).state_dict()
        save_whole(content, file)
        files.append(file)
        place |= dict.fromkeys(content, file.name)
    if len(shards) > 1:
        write_index(target / "pytorch_model.bin.index.json", place, total_bytes(weights.tensors))
    return files


def write_index(file: Path, place: dict[str, str], total: int) -> None:
    """Which file each tensor is in, as `transformers` keeps it."""
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    write_whole(file, [(json.dumps(content, indent=2) + "\n").encode()])


def save_whole(content: dict[str, Any], file: Path) -> None:
    """`torch.save`, under a temporary name until the file is complete.

    Raises:
        OSError: no space, no permission, ...; a file of that name is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        with temporary.open("wb") as handle:
            torch.save(content, handle)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
