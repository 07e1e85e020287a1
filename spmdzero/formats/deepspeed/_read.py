"""Reads a folder that DeepSpeed wrote into a `TrainingState`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdzero.formats._state import StoredTensor, TrainingState
from spmdzero.formats.deepspeed._flat import FlatGroup
from spmdzero.formats.deepspeed._host import host_state
from spmdzero.formats.deepspeed._model_file import ModelFile, model_file
from spmdzero.formats.deepspeed._model_ranks import ModelRanks
from spmdzero.formats.deepspeed._optimizer import MASTER, NUMBER, Order, SavedOptimizer
from spmdzero.formats.deepspeed._partitioned import read_partitioned
from spmdzero.formats.deepspeed._pickles import damaged
from spmdzero.formats.deepspeed._pipeline import joined, layer_files, read_stages
from spmdzero.formats.deepspeed._rank_files import rank_files, read_ranks
from spmdzero.formats.deepspeed._universal import STATES, read_universal, universal_states


def read_unsharded(model: ModelFile, order: Order | None) -> SavedOptimizer:
    """The states of a torch optimizer, and the masters of a 16-bit one.

    Args:
        model: the model's file.
        order: the parameters' names in each param group, which the file doesn't have; None takes
            the model's order for a file with one group. If this is not the order of the file,
            states and masters are named by number, ``#0``, which suffices to look at them.

    Raises:
        SpmdZeroCheckpointError: the file has other shapes than the parameters of `order`.
    """
    optimizer = model.content["optimizer"]
    base = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = base["param_groups"], base["state"]
    # DeepSpeed's fused fp16 optimizer has a flat tensor per group. Others have one state per
    # parameter and, for 16-bit parameters, an fp32 copy of each.
    flat, copies = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    if order is None and len(groups) == 1:
        order = [list(model.parameters)]
    if order is None or not _fits(order, groups, model, flat=flat is not None):
        order = [[f"{NUMBER}{number}" for number in group["params"]] for group in groups]
        flat = copies = None
    saved = SavedOptimizer(model=model, scaler=optimizer if "cur_scale" in optimizer else None)
    for index, (names, group) in enumerate(zip(order, groups, strict=True)):
        saved.add_group(group, names)
        if flat is not None:
            shapes = {name: model.parameters[name].shape for name in names}
            layout = FlatGroup(shapes=shapes, gaps=(0,) * len(shapes))
            slots = {MASTER: flat[index], **states.get(group["params"][0], {})}
            saved.add_flat(layout, [slots], files=[model.path])
            continue
        for place, (name, number) in enumerate(zip(names, group["params"], strict=True)):
            own = {MASTER: copies[index][place]} if copies is not None else {}
            saved.add(name, own | states.get(number, {}), file=model.path)
    return saved


def _fits(
    order: Order, saved: Sequence[Mapping[str, Any]], model: ModelFile, *, flat: bool
) -> bool:
    if len(order) != len(saved) or any(n not in model.parameters for names in order for n in names):
        return False
    # A flat group counts as one parameter; its elements are compared later.
    pairs = zip(order, saved, strict=True)
    return flat or all(len(names) == len(group["params"]) for names, group in pairs)


_OTHER_KINDS = {
    "*expert_*_states.pt": (
        "a mixture of experts wrote it",
        "spmdzero is data-parallel: save the model from DeepSpeed as one state dict",
    ),
}

_MODEL_RANK = re.compile(r"mp_rank_(\d+)")


def recognises(folder: Path) -> bool:
    """Whether DeepSpeed wrote the folder of a tag, in any of its formats."""
    patterns = (model_file(), *_OTHER_KINDS, "*zero_pp_rank_*_states.pt")
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def read(folder: Path, order: Order | None = None) -> TrainingState:
    """The state in the folder of a tag that DeepSpeed wrote: regular or universal, at any stage.

    Every file is opened and its checksums are compared. Tensors are mapped, and read when they are
    asked for. What AutoTP has split over its ranks is joined.

    Args:
        folder: `<save_dir>/<tag>`.
        order: the names of the parameters in each param group, which DeepSpeed doesn't save at
            stage 0; None reads one group in the model's order.

    Raises:
        SpmdZeroCheckpointError: a file is missing, damaged, or holds code; or it comes from a
            parallelism that spmdzero doesn't have.
    """
    for pattern, (reason, fix) in _OTHER_KINDS.items():
        other = next(folder.glob(pattern), None)
        if other is not None:
            raise damaged(other, reason, fix)
    if layers := layer_files(folder):
        stages = read_stages(folder, layers, order)
        each = [(model, _saved(folder, model, order, n)) for n, model in enumerate(stages)]
        found = [joined(each)]
    else:
        first = _read_rank(folder, order, 0)
        found = [first, *(_read_rank(folder, order, n) for n in range(1, first[0].model_ranks))]
    ranks = ModelRanks([model for model, _ in found])
    model = ranks.model
    saved = ranks.optimizer([each for _, each in found])
    if saved is None and _is_universal(folder) and model.trained is not None:
        saved = read_universal(folder, model, universal_states(folder, model.trained))
    states = [_tensors(*each) for each in found]
    return TrainingState(
        tensors=_tensors(model, saved),
        host=host_state(model, saved),
        source=str(model.path),
        check=ranks.check_copies({k: [each[k] for each in states] for k in states[0]}),
    )


def _tensors(model: ModelFile, saved: SavedOptimizer | None) -> dict[str, StoredTensor]:
    return model.tensors() | (saved.tensors if saved else {})


def _is_universal(folder: Path) -> bool:
    return (folder / STATES).is_dir()


def _read_rank(
    folder: Path, order: Order | None, model_rank: int
) -> tuple[ModelFile, SavedOptimizer | None]:
    """The model and the optimizer of one model-parallel rank.

    The universal format's optimizer is whole, and is read by `read` below stage 3.
    """
    path = folder / model_file(model_rank)
    if not path.is_file() and rank_files(folder, states="model"):
        return read_partitioned(folder, model_rank=model_rank)
    # Below stage 3 a model-parallel rank has one file with its parameters.
    model = ModelFile.read(path)
    return model, _saved(folder, model, order, model_rank)


def _saved(
    folder: Path, model: ModelFile, order: Order | None, model_rank: int
) -> SavedOptimizer | None:
    if _is_universal(folder):
        if model.trained is None:
            raise damaged(model.path, "it names no trained parameters (param_shapes)")
        return None
    if model.trained is not None:
        return read_ranks(folder, model, model_rank=model_rank)
    if model.content.get("optimizer") is not None:
        return read_unsharded(model, order)
    return None


def newest_complete(folder: Path, *, but: str | None = None) -> str | None:
    """The tag in `folder` that was written last and has all its files."""
    if not folder.is_dir():
        return None
    found = [path for path in folder.iterdir() if path.name != but and _is_whole(path)]
    newest = max(found, key=lambda path: _models(path)[0].stat().st_mtime, default=None)
    return newest.name if newest else None


def _models(path: Path) -> list[Path]:
    """The files with the model; stage 3 has one for each rank."""
    whole = [path / model_file(rank) for rank in _model_ranks(path)]
    if whole and whole[0].is_file():
        return whole
    return [
        file
        for rank in _model_ranks(path)
        for file in rank_files(path, states="model", model_rank=rank).values()
    ]


def _model_ranks(path: Path) -> range:
    """The model-parallel ranks of which there are files."""
    names = (_MODEL_RANK.search(file.name) for file in path.glob("*mp_rank_*_states.pt"))
    return range(1 + max((int(found[1]) for found in names if found), default=-1))


def _is_whole(path: Path) -> bool:
    if not path.is_dir() or not _models(path):
        return False
    counts = set()
    for rank in _model_ranks(path):
        each = [rank_files(path, model_rank=rank)]
        if not (path / model_file(rank)).is_file():
            each.append(rank_files(path, states="model", model_rank=rank))
            if not each[1] or (not _is_universal(path) and len(each[0]) != len(each[1])):
                return False
        if any(list(ranks) != list(range(len(ranks))) for ranks in each):
            return False
        counts.add(len(each[0]))
    return len(counts) == 1
