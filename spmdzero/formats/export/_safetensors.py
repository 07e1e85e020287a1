"""Weights as Hugging Face keeps them: safetensors files and an index."""

from pathlib import Path

from spmdzero.formats._boxes import whole_box
from spmdzero.formats._state import StoredTensor
from spmdzero.formats._tensor_file import Entry, write_tensors
from spmdzero.formats.export._shards import bytes_of, in_shards, total_bytes
from spmdzero.formats.export._state_dict import write_index
from spmdzero.formats.export._weights import Weights


def write_safetensors(
    weights: Weights, folder: Path, *, max_shard_size: int | str = "5GB"
) -> list[Path]:
    """Writes `model.safetensors`, or several files and `model.safetensors.index.json`.

    The names are those that `transformers` loads. One tensor is in memory at a time. Tied
    parameters are written once, under their first name, as `transformers` does; what loads the
    files ties them again.

    Args:
        weights: what to write.
        folder: where; made if need be.
        max_shard_size: of a file, as `bytes_of` reads it. A larger tensor gets a file of its own.

    Returns the files with tensors, in order.

    Raises:
        SpmdZeroUsageError: a size that can't be read, or a dtype that safetensors has not.
        OSError: no space, no permission, ...
    """
    shards = in_shards(weights.tensors, bytes_of(max_shard_size))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    place: dict[str, str] = {}
    for index, names in enumerate(shards):
        part = f"-{index + 1:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = folder / f"model{part}.safetensors"
        entries = [_entry(name, weights.tensors[name]) for name in names]
        write_tensors(file, entries, metadata={"format": "pt"})
        files.append(file)
        place |= dict.fromkeys(names, file.name)
    if len(shards) > 1:
        write_index(folder / "model.safetensors.index.json", place, total_bytes(weights.tensors))
    return files


def _entry(name: str, tensor: StoredTensor) -> Entry:
    box = whole_box(tensor.shape)
    return Entry(key=name, tensor=name, box=box, dtype=tensor.dtype, read=tensor.read)
