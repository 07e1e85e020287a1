"""Joins what DeepSpeed's model-parallel ranks (AutoTP) have saved: each has a part of a weight."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from spmdzero.formats._boxes import Box
from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._model_file import ModelFile, trained_shapes
from spmdzero.formats.deepspeed._optimizer import SavedOptimizer
from spmdzero.formats.deepspeed._pickles import damaged
from spmdzero.formats.deepspeed._splits import INFO, Split, SplitError, is_known, read_split

_CONSOLIDATE = (
    "Load it into DeepSpeed with the same autotp_size, and save what "
    "engine._consolidated_16bit_state_dict() gives on rank 0: the whole weights, without optimizer "
    "states, for model.load_state_dict before initialize"
)
_ONE_CHECKPOINT = "Load all files of one checkpoint, as the ranks wrote it"

Check = Callable[[Mapping[str, Iterable[Box]]], None]


class ModelRanks:
    """The model-parallel ranks of a checkpoint.

    Args:
        models: the contents of each one's model file, in order.

    Raises:
        SpmdZeroCheckpointError: the files don't say how weights are split, or don't fit together.
    """

    def __init__(self, models: Sequence[ModelFile]) -> None:
        self._models, first = models, models[0]
        self._splits = dict[str, Split]()
        if len(models) == 1:
            return
        info = first.content.get(INFO)
        if info is None or not is_known(info):
            raise damaged(
                first.path,
                f"tensor parallelism over {len(models)} ranks wrote it, and it doesn't say how "
                f"weights are split, as AutoTP of DeepSpeed 0.19.8 does ({INFO})",
                _CONSOLIDATE,
            )
        for name, parts in self._parts(lambda model: model.parameters).items():
            try:
                split = read_split(info, name, [part.shape for part in parts])
            except SplitError as error:
                raise damaged(first.path, str(error), _CONSOLIDATE) from error
            if split is not None:
                self._splits[name] = split

    @functools.cached_property
    def model(self) -> ModelFile:
        """The model file with whole weights; the rest of its content is the first rank's."""
        first = self._models[0]
        if len(self._models) == 1:
            return first
        whole = dict(first.content)
        groups = trained_shapes(first.content)
        if groups is not None:
            whole["param_shapes"] = [
                {name: self._whole_shape(name, shape) for name, shape in group.items()}
                for group in groups
            ]
        parts = self._parts(lambda model: model.parameters)
        joined = {name: self._joined(name, each) for name, each in parts.items()}
        return dataclasses.replace(first, content=whole, parameters=joined)

    def optimizer(self, found: Sequence[SavedOptimizer | None]) -> SavedOptimizer | None:
        """The whole states of the optimizer, of those of each rank."""
        saved = [each for each in found if each is not None]
        if len(found) == 1 or not saved:
            return found[0]
        first = saved[0]
        tensors = dict[str, StoredTensor]()
        for key in first.tensors:
            role, _, name = key.partition("/")
            for model, each in zip(self._models, saved, strict=True):
                if key not in each.tensors:
                    raise damaged(
                        model.path, f"it has no {role} of {name}, which rank 0 has", _ONE_CHECKPOINT
                    )
            parts = [each.tensors[key] for each in saved]
            # A state may be one number for all of a parameter.
            tensors[key] = self._joined(name, parts) if parts[0].shape else parts[0]
        return dataclasses.replace(first, model=self.model, tensors=tensors)

    def check_copies(self, tensors: Mapping[str, Sequence[StoredTensor]]) -> Check:
        """A check that the ranks hold the same values of what each holds whole.

        Args:
            tensors: name of a tensor -> that of each rank.
        """

        def check(wanted: Mapping[str, Iterable[Box]]) -> None:
            for key in wanted:
                name, parts = key.partition("/")[2], tensors.get(key, ())
                if name in self._splits or len(parts) < 2:
                    continue
                mine = parts[0].whole()
                for rank, part in enumerate(parts[1:], 1):
                    theirs = part.whole()
                    if not torch.equal(mine, theirs):
                        apart = (mine.double() - theirs.double()).abs().max().item()
                        raise damaged(
                            self._models[rank].path,
                            f"{key} is the same on each model-parallel rank, and that of rank "
                            f"{rank} differs from rank 0's by {apart:.3g}",
                            _ONE_CHECKPOINT,
                        )

        return check

    def _whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        split = self._splits.get(name)
        return shape if split is None else split.whole_shape(shape)

    def _joined(self, name: str, parts: Sequence[StoredTensor]) -> StoredTensor:
        split = self._splits.get(name)
        return parts[0] if split is None else split.join(parts)

    def _parts(
        self, tensors: Callable[[ModelFile], Mapping[str, StoredTensor]]
    ) -> dict[str, list[StoredTensor]]:
        found: dict[str, list[StoredTensor]] = {}
        for name in tensors(self._models[0]):
            for model in self._models:
                if name not in tensors(model):
                    raise damaged(
                        model.path, f"its module has no {name}, which rank 0 has", _ONE_CHECKPOINT
                    )
            found[name] = [tensors(model)[name] for model in self._models]
        return found
