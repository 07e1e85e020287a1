"""Weights in the files that `transformers` loads: safetensors, or torch's state dicts."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._boxes import whole_box
from spmdzero.formats._files import save_torch, write_whole
from spmdzero.formats._tensor_file import Entry, write_tensors
from spmdzero.formats.export._weights import Weights

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def write_safetensors(
    weights: Weights, folder: Path, *, max_shard_size: int | str = "5GB"
) -> list[Path]:
    """Writes `model.safetensors`, or several files and `model.safetensors.index.json`.

    Only one tensor is in memory at a time. Tied parameters are written once, under their first
    name, as `transformers` does; the loading program ties them again.

    Args:
        weights: the weights to write.
        folder: the target; created if need be.
        max_shard_size: of a file: ``"5GB"`` (10**9 bytes each), ``"500MiB"`` (2**20) or a number.
            A larger tensor gets a file of its own.

    Returns the files with tensors, in order.

    Raises:
        SpmdZeroUsageError: the size can't be read, or safetensors doesn't have a dtype.
        OSError: no space, no permission, ...
    """

    def write(part: Weights, file: Path) -> Iterable[str]:
        entries = [
            Entry(key=name, box=whole_box(tensor.shape), dtype=tensor.dtype, read=tensor.read)
            for name, tensor in part.tensors.items()
        ]
        write_tensors(file, entries, metadata={"format": "pt"})
        return part.tensors

    return _write_files(weights, folder / "model.safetensors", write, max_shard_size)


def write_state_dict(
    weights: Weights, target: Path, *, max_shard_size: int | str = "5GB"
) -> list[Path]:
    """Writes a state dict for `torch.load(weights_only=True)` and `load_state_dict`.

    It has tied parameters under each of their names, as one tensor.

    Args:
        weights: the weights to write.
        target: a file if it has a suffix for one (``.bin``, ``.pt``, ``.pth``), else a folder for
            `pytorch_model.bin`, or several files and `pytorch_model.bin.index.json`.
        max_shard_size: of a file in a folder, as for `write_safetensors`.

    Only one tensor is in memory at a time; those of a file are first put into the system's
    temporary folder.

    Returns and raises as `write_safetensors`.
    """

    def write(part: Weights, file: Path) -> Iterable[str]:
        content = part.state_dict()
        save_torch(content, file)
        return content

    if target.suffix in (".bin", ".pt", ".pth"):
        write(weights, target)
        return [target]
    return _write_files(weights, target / "pytorch_model.bin", write, max_shard_size)


def _write_files(
    weights: Weights,
    whole: Path,
    write: Callable[[Weights, Path], Iterable[str]],
    max_shard_size: int | str,
) -> list[Path]:
    """Writes `whole`, or several files named after it and an index; `write` returns its keys."""
    parts = _parts(weights, _bytes_of(max_shard_size))
    whole.parent.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    place: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"{whole.stem}-{number:05}-of-{len(parts):05}{whole.suffix}"
        files.append(whole.with_name(name) if len(parts) > 1 else whole)
        place |= dict.fromkeys(write(part, files[-1]), files[-1].name)
    if len(parts) > 1:
        total = sum(tensor.size for tensor in weights.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
        data = (json.dumps(index, indent=2) + "\n").encode()
        write_whole(whole.with_name(f"{whole.name}.index.json"), data)
    return files


def _bytes_of(size: int | str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", str(size).strip().upper())
    if not found or not int(found[1]):
        raise SpmdZeroUsageError(f"max_shard_size={size!r}: write a size such as '5GB' or '500MiB'")
    return int(found[1]) * _UNITS[found[2] or ""]


def _parts(weights: Weights, limit: int) -> list[Weights]:
    """The weights, in order, split where a file would have more than `limit` bytes."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, tensor in weights.tensors.items():
        if parts[-1] and held + tensor.size > limit:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += tensor.size
    return [weights.only(names) for names in parts]
