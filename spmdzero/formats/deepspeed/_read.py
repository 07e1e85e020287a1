"""Reads a folder that DeepSpeed wrote into a `TrainingState`."""

from pathlib import Path

from spmdzero.formats._state import TrainingState
from spmdzero.formats.deepspeed._host import host_state
from spmdzero.formats.deepspeed._model_file import MERGE, MODEL_FILE, ModelFile
from spmdzero.formats.deepspeed._optimizer import Order, SavedOptimizer
from spmdzero.formats.deepspeed._partitioned import model_files, read_partitioned
from spmdzero.formats.deepspeed._pickles import damaged
from spmdzero.formats.deepspeed._rank_files import rank_files, read_ranks
from spmdzero.formats.deepspeed._universal import STATES, read_universal, universal_states
from spmdzero.formats.deepspeed._unsharded import read_unsharded

_OTHER_KINDS = {
    "*mp_rank_01_model_states.pt": (
        "tensor parallelism wrote it",
        MERGE,
    ),
    "layer_*model_states.pt": (
        "pipeline parallelism or a mixture of experts wrote it",
        "spmdzero is data-parallel: save the model from DeepSpeed as one state dict",
    ),
}


def recognises(folder: Path) -> bool:
    """Whether DeepSpeed wrote the folder of a tag, in any of its formats."""
    patterns = (MODEL_FILE, *_OTHER_KINDS, "*zero_pp_rank_*_states.pt")
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def read(folder: Path, order: Order | None = None) -> TrainingState:
    """The state in the folder of a tag that DeepSpeed wrote: regular or universal, at any stage.

    Every file is opened and its checksums are compared. Tensors are mapped, and read when they are
    asked for.

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
    whole = (folder / MODEL_FILE).is_file() or not model_files(folder)
    model, saved = _read_whole(folder, order) if whole else read_partitioned(folder)
    return TrainingState(
        tensors=model.tensors() | (saved.tensors if saved else {}),
        host=host_state(model, saved),
        source=str(model.path),
    )


def _read_whole(folder: Path, order: Order | None) -> tuple[ModelFile, SavedOptimizer | None]:
    """The model and the optimizer of stages 0 to 2, where one file has the whole parameters."""
    model = ModelFile.read(folder / MODEL_FILE)
    if (folder / STATES).is_dir():
        if model.trained is None:
            raise damaged(model.path, "it names no trained parameters (param_shapes)")
        return model, read_universal(folder, model, universal_states(folder, model.trained))
    if model.trained is not None:
        return model, read_ranks(folder, model)
    if model.content.get("optimizer") is not None:
        return model, read_unsharded(model, order)
    return model, None


def newest_complete(folder: Path, *, but: str | None = None) -> str | None:
    """The tag in `folder` that was written last and has all its files."""
    if not folder.is_dir():
        return None
    found = [path for path in folder.iterdir() if path.name != but and _is_whole(path)]
    newest = max(found, key=lambda path: _models(path)[0].stat().st_mtime, default=None)
    return newest.name if newest else None


def _models(path: Path) -> list[Path]:
    """The files with the model; stage 3 has one for each rank."""
    whole = path / MODEL_FILE
    return [whole] if whole.is_file() else list(model_files(path).values())


def _is_whole(path: Path) -> bool:
    if not path.is_dir() or not _models(path):
        return False
    each = [rank_files(path)]
    if not (path / MODEL_FILE).is_file():
        each.append(model_files(path))
        if not (path / STATES).is_dir() and len(each[0]) != len(each[1]):
            return False
    return all(list(ranks) == list(range(len(ranks))) for ranks in each)
