"""Reads the files of DeepSpeed's ranks under ZeRO-1/2, one per rank."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdzero.formats.deepspeed._flat import FlatGroup
from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._optimizer import MASTER, STEP, SavedOptimizer
from spmdzero.formats.deepspeed._pickles import damaged, read_pt

_MASTERS = "single_partition_of_fp32_groups"


def rank_files(folder: Path, *, states: str = "optim", model_rank: int = 0) -> dict[int, Path]:
    """Data-parallel rank -> its file of a kind of `states`, in order.

    Args:
        folder: of the tag.
        states: "optim" for its part of the optimizer, "model" for that of the model at stage 3.
        model_rank: the model-parallel rank.
    """
    named = re.compile(
        rf"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_{model_rank:02d}_?{states}_states\.pt"
    )
    found = ((named.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(name[1]), path) for name, path in found if name))


def rank_file(rank: int | str, *, states: str = "optim", model_rank: int = 0) -> str:
    """The name of such a file."""
    return f"zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_{states}_states.pt"


def every_rank(
    folder: Path, ranks: int | None, *, states: str = "optim", model_rank: int = 0
) -> list[Path]:
    """The files of all data-parallel ranks that saved, in order.

    Args:
        folder, states, model_rank: as of `rank_files`.
        ranks: number of ranks that saved; None for those whose files there are.

    Raises:
        SpmdZeroCheckpointError: a file is missing.
    """
    found = rank_files(folder, states=states, model_rank=model_rank)
    ranks = ranks or len(found)
    for rank in range(ranks):
        if rank not in found:
            raise damaged(
                folder / rank_file(rank, states=states, model_rank=model_rank),
                f"the file of rank {rank} is missing, {ranks} ranks saved",
            )
    return [found[rank] for rank in range(ranks)]


def read_ranks(folder: Path, model: ModelFile, *, model_rank: int = 0) -> SavedOptimizer:
    """The masters and the optimizer states that the files of a model-parallel rank hold together.

    Raises:
        SpmdZeroCheckpointError: a rank's file is missing, can't be read, or doesn't fit the others.
    """
    files = every_rank(folder, model.content.get("dp_world_size"), model_rank=model_rank)
    ranks = [_optimizer_state(file) for file in files]
    saved = SavedOptimizer(model=model, scaler=ranks[0].get("loss_scaler"))
    for index, shapes in enumerate(model.trained or ()):
        gaps = ranks[0].get("param_alignment_paddings")
        group = FlatGroup(shapes=shapes, gaps=tuple(gaps[index] if gaps else [0] * len(shapes)))
        states, numbers = zip(*(_base_state(rank, index) for rank in ranks), strict=True)
        if STEP in numbers[0]:
            saved.steps |= dict.fromkeys(shapes, numbers[0][STEP])
        slots = [
            {MASTER: rank[_MASTERS][index], **state}
            for rank, state in zip(ranks, states, strict=True)
        ]
        saved.add_flat(group, slots, files=files, padded=True)
        saved.add_group(numbers[0], shapes)
    return saved


def _optimizer_state(path: Path) -> dict[str, Any]:
    content = read_pt(path)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or _MASTERS not in state:
        raise damaged(path, "it holds no optimizer state of ZeRO-1/2")
    return state


def _base_state(state: Mapping[str, Any], index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states and the hyperparameters of one group, from one rank."""
    base = state["base_optimizer_state"]
    if isinstance(base, list):
        # `elastic_checkpoint`: a state for each group, and the step in a separate key.
        step = state.get("base_optimizer_state_step")
        return base[index] if step is None else base[index] | {STEP: step}, {}
    group = base["param_groups"][index]
    return base["state"].get(group["params"][0], {}), group
