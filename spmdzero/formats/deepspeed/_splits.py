"""How DeepSpeed's AutoTP splits weights over its ranks: parts are joined, and wholes are cut."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spmdzero.formats._boxes import Box, assemble, whole_box
from spmdzero.formats._state import StoredTensor, TrainingState

INFO = "universal_checkpoint_info"
"""The key of a model's file that says how its weights are split."""
# Keys of that record, each with regular expressions for names (DeepSpeed, checkpoint/constants.py).
_VERSION, _VERSION_NUMBER = "universal_checkpoint_version", 0.4
_ROW = "parameter_with_row_parallelism_patterns"
_WHOLE = "tp_replicated_parameter_patterns"
_FUSED, _FUSED_WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_UNKNOWN = "autotp_unsupported_parameter_patterns"
_VOCABULARY, _WORDS = "vocabulary_parameter_patterns", "original_vocab_size"


class SplitError(ValueError):
    """Why parts can't be joined; the reader adds the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How the ranks share a tensor.

    Attributes:
        dim: the dim along which each has a part.
        widths: the length of each rank's part. A weight that is several in one, such as query, key
            and value, has such a tuple for each of them, in their order along `dim`.
    """

    dim: int
    widths: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, shape: Sequence[int], dim: int, *, ranks: int, of: Sequence[int] = ()) -> "Split":
        """Equal parts of `shape` along `dim`, or of each of the lengths `of` that it is made of."""
        lengths = of or (shape[dim],)
        return cls(dim=dim, widths=tuple((length // ranks,) * ranks for length in lengths))

    def part_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of `shape`."""
        length = sum(widths[rank] for widths in self.widths)
        return (*shape[: self.dim], length, *shape[self.dim + 1 :])

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which a rank has a part of this shape."""
        length = sum(map(sum, self.widths))
        return (*part[: self.dim], length, *part[self.dim + 1 :])

    def join(self, parts: Sequence[StoredTensor]) -> StoredTensor:
        """The tensor of which each rank has one of `parts`."""
        runs = [(first, parts[rank], at, width) for rank, first, at, width in self._runs()]
        return _made_of(runs, self.whole_shape(parts[0].shape), parts[0].dtype, self.dim)

    def cut(self, tensor: StoredTensor, rank: int) -> StoredTensor:
        """A rank's part of a tensor."""
        runs = [(at, tensor, first, width) for own, first, at, width in self._runs() if own == rank]
        return _made_of(runs, self.part_shape(tensor.shape, rank), tensor.dtype, self.dim)

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields each run of `dim`: rank, first index in the whole and in the part, length."""
        whole, there = 0, [0] * len(self.widths[0])
        for widths in self.widths:
            for rank, width in enumerate(widths):
                yield rank, whole, there[rank], width
                whole += width
                there[rank] += width


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The AutoTP ranks that share a run's weights.

    Attributes:
        size: number of them, DeepSpeed's ``autotp_size``.
        splits: name of a parameter -> how they share it; others are whole on each.
    """

    size: int = 1
    splits: Mapping[str, Split] = dataclasses.field(default_factory=dict)

    def part(self, state: TrainingState, rank: int) -> TrainingState:
        """The state of one of the ranks, whose weights and their states are its parts."""

        def own(key: str, tensor: StoredTensor) -> StoredTensor:
            role, _, name = key.partition("/")
            split = self.splits.get(name)
            # A state may be one number for all of a parameter, and a buffer is no weight.
            if split is None or role == "buffer" or not tensor.shape:
                return tensor
            return split.cut(tensor, rank)

        tensors = {key: own(key, tensor) for key, tensor in state.tensors.items()}
        return dataclasses.replace(state, tensors=tensors)

    def whole_shapes(self, parts: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
        """Name of a parameter -> its whole shape, by a rank's parts of them."""
        return {
            name: self.splits[name].whole_shape(part.shape) if name in self.splits else part.shape
            for name, part in parts.items()
        }


ALONE = TensorParallel()
"""One rank, with whole weights."""


def _made_of(
    runs: Sequence[tuple[int, StoredTensor, int, int]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dim: int,
) -> StoredTensor:
    """A tensor made of runs along `dim`: first index, source, first index there, length."""

    def read(box: Box) -> torch.Tensor:
        pieces = []
        for first, source, there, width in runs:
            low, high = max(box[dim][0], first), min(box[dim][1], first + width)
            if low < high:
                inside = _with(box, dim, low - first + there, high - first + there)
                pieces.append((_with(box, dim, low, high), source.read(inside)))
        return assemble(box, pieces, dtype=dtype)

    return StoredTensor(shape=shape, dtype=dtype, read=read, pieces=(whole_box(shape),))


def _with(box: Box, dim: int, low: int, high: int) -> Box:
    return (*box[:dim], (low, high), *box[dim + 1 :])


def _pattern(name: str) -> str:
    # AutoTP writes a name as an expression for itself alone, so nothing in a file has to be run.
    return rf"^{re.escape(name)}$"


def is_known(info: Any) -> bool:
    """Whether AutoTP has written the record of a model's file, and not Megatron-DeepSpeed."""
    return isinstance(info, Mapping) and _UNKNOWN in info


def read_split(
    info: Mapping[str, Any], name: str, shapes: Sequence[tuple[int, ...]]
) -> Split | None:
    """How the ranks share a parameter, None where each has all of it.

    Args:
        info: the record of the model's file, which `is_known`.
        name: of the parameter.
        shapes: of each rank's part.

    Raises:
        SplitError: the parts don't fit together, or DeepSpeed doesn't say how.

    Source: DeepSpeed, checkpoint/ds_to_universal.py, `merge_tp_slices`.
    """
    pattern = _pattern(name)
    if pattern in info[_UNKNOWN]:
        raise SplitError(f"{name} is split in a way that it doesn't say: {info[_UNKNOWN][pattern]}")
    if pattern in info.get(_WHOLE, ()):
        if len(set(shapes)) > 1:
            raise SplitError(f"{name} is the same on each rank, and has shapes {_listed(shapes)}")
        return None
    fused = next((each for each in info.get(_FUSED, ()) if pattern in each["patterns"]), None)
    dim = 1 if pattern in info.get(_ROW, ()) else 0
    if fused is None:
        lengths = tuple(shape[dim] if dim < len(shape) else 0 for shape in shapes)
        found = Split(dim=dim, widths=(lengths,))
    else:
        found = _fused(fused, info.get(_FUSED_WIDTHS, {}).get(pattern), name, shapes)
    whole = found.whole_shape(shapes[0])
    if any(shape != found.part_shape(whole, rank) for rank, shape in enumerate(shapes)):
        raise SplitError(
            f"{name} is split along dim {found.dim}, and its parts of {_listed(shapes)} "
            f"aren't those of {list(whole)}"
        )
    return found


def _fused(
    record: Mapping[str, Any],
    widths: Sequence[Sequence[int]] | None,
    name: str,
    shapes: Sequence[tuple[int, ...]],
) -> Split:
    """How a weight is split that is several in one; without widths all parts are equal."""
    logical, dim = record["shape"], record["partition_dim"]
    if len(logical) > max(2, len(shapes[0])) or dim >= len(shapes[0]):
        raise SplitError(
            f"{name} is split as a tensor of shape {list(logical)}, and its parts are "
            f"{_listed(shapes)}: spmdzero joins along a dim of the weight itself"
        )
    if widths is not None:
        return Split(dim=dim, widths=tuple(tuple(each) for each in widths))
    ranks, lengths = len(shapes), logical[dim]
    if isinstance(lengths, int):
        lengths = (sum(shape[dim] for shape in shapes) // lengths,) * lengths
    if any(length % ranks for length in lengths):
        raise SplitError(f"{name} is made of {list(lengths)}, which {ranks} ranks can't share")
    return Split.even((), dim, ranks=ranks, of=lengths)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


def record_of(splits: Mapping[str, Split], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The record that AutoTP writes into a model's file, by which its converter joins the parts.

    Args:
        splits: name of a parameter -> how the ranks share it; others are whole on each.
        shapes: name of each parameter -> its whole shape.

    Source: DeepSpeed, module_inject/layers.py, `collect_autotp_universal_checkpoint_info`.
    """
    fused = {name: split for name, split in splits.items() if len(split.widths) > 1}
    plain = {name: split for name, split in splits.items() if name not in fused}
    words = [
        name
        for name, split in plain.items()
        if split.dim == 0 and len(shapes[name]) == 2 and ("embed" in name or "lm_head" in name)
    ]
    row = [n for n, split in splits.items() if split.dim == 1]
    record: dict[str, Any] = {
        _VERSION: _VERSION_NUMBER,
        _ROW: sorted(map(_pattern, row)),
        _WHOLE: sorted(_pattern(name) for name in shapes if name not in splits),
        _VOCABULARY: sorted(map(_pattern, words)),
        _FUSED: [
            {
                "patterns": [_pattern(name)],
                "shape": _logical_shape(split, shapes[name]),
                "partition_dim": split.dim,
            }
            for name, split in fused.items()
        ],
        _UNKNOWN: {},
    }
    if fused:
        record[_FUSED_WIDTHS] = {
            _pattern(name): [list(widths) for widths in split.widths]
            for name, split in fused.items()
        }
    if words:
        record[_WORDS] = shapes[words[0]][0]
    return record


def _logical_shape(split: Split, shape: tuple[int, ...]) -> list[Any]:
    lengths = tuple(map(sum, split.widths))
    return [lengths if dim == split.dim else -1 for dim in range(len(shape))]
