"""A folder that DeepSpeed wrote, as a `TrainingState`."""

from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._state import TrainingState
from spmdzero.formats.deepspeed._host import OptimizerFile, host_state
from spmdzero.formats.deepspeed._model_file import MODEL_FILE, ModelFile
from spmdzero.formats.deepspeed._pickles import DamagedFile
from spmdzero.formats.deepspeed._regular import rank_files, read_ranks
from spmdzero.formats.deepspeed._universal import STATES, read_universal
from spmdzero.formats.deepspeed._unsharded import Order, read_unsharded

_OTHER_KINDS = {
    "zero_pp_rank_*_model_states.pt": (
        "ZeRO-3 wrote it, which partitions parameters",
        "Take its weights by DeepSpeed's zero_to_fp32.py and start from them",
    ),
    "mp_rank_01_model_states.pt": (
        "tensor parallelism wrote it",
        "spmdzero is data-parallel: merge it with DeepSpeed first, and save that",
    ),
    "layer_*model_states.pt": (
        "pipeline parallelism or a mixture of experts wrote it",
        "spmdzero is data-parallel: save the model from DeepSpeed as one state dict",
    ),
}


def recognises(folder: Path) -> bool:
    """Whether DeepSpeed wrote the folder of a tag, in any of its formats."""
    patterns = (MODEL_FILE, *_OTHER_KINDS, "*zero_pp_rank_*_optim_states.pt")
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def read(folder: Path, order: Order | None = None) -> TrainingState:
    """The state in the folder of a tag that DeepSpeed wrote: regular or universal, stage 0 to 2.

    Every file is opened and its checksums are compared; tensors are mapped, and read when asked.

    Args:
        folder: `<save_dir>/<tag>`.
        order: the names of the parameters in each param group, which DeepSpeed doesn't save at
            stage 0; None reads one group in the model's order.

    Raises:
        SpmdZeroCheckpointError: a file is missing, damaged, or holds what would be run; or it is
            of a parallelism that spmdzero has not.
    """
    try:
        for pattern, (reason, fix) in _OTHER_KINDS.items():
            other = next(folder.glob(pattern), None)
            if other is not None:
                raise DamagedFile(file=other, reason=reason, fix=fix)
        return _read(folder, order)
    except DamagedFile as damage:
        raise SpmdZeroCheckpointError(
            file=damage.file, reason=damage.reason, newest=newest_tag(folder), fix=damage.fix
        ) from damage


def newest_tag(besides: Path) -> str | None:
    """The tag beside `besides` that was written last and has all of its files."""
    found = [p for p in besides.parent.iterdir() if p != besides and p.is_dir() and _is_whole(p)]
    newest = max(found, key=lambda p: (p / MODEL_FILE).stat().st_mtime, default=None)
    return newest.name if newest else None


def _is_whole(folder: Path) -> bool:
    ranks = rank_files(folder)
    return (folder / MODEL_FILE).is_file() and list(ranks) == list(range(len(ranks)))


def _read(folder: Path, order: Order | None) -> TrainingState:
    model = ModelFile.read(folder / MODEL_FILE)
    tensors = model.tensors()
    found: OptimizerFile | None = None
    if (folder / STATES).is_dir():
        states, found = read_universal(folder, model)
    elif model.trained is not None:
        states, found = read_ranks(folder, model)
    elif model.content.get("optimizer") is not None:
        states, found = read_unsharded(model, order)
    else:
        states = {}
    return TrainingState(
        tensors=tensors | states,
        host=host_state(model.content, found, file=model.path, extra=model.extra, tied=model.tied),
        source=str(model.path),
    )
