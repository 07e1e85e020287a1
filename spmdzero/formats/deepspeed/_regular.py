"""Reads what DeepSpeed's ranks wrote under ZeRO-1/2, one file each."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._flat import FlatGroup
from spmdzero.formats.deepspeed._host import OptimizerFile, numbers, scalar
from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._pickles import DamagedFile, read_pt

RANK_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_?optim_states\.pt")
Tensors = dict[str, StoredTensor]


def rank_files(folder: Path) -> dict[int, Path]:
    """Rank -> its file, in order."""
    found = ((RANK_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(name[1]), path) for name, path in found if name))


def read_ranks(folder: Path, model: ModelFile) -> tuple[Tensors, OptimizerFile]:
    """The masters and the optimizer states that the ranks' files hold together.

    Raises:
        DamagedFile: a rank's file is missing, can't be read, or doesn't fit the others.
    """
    files = rank_files(folder)
    expected = int(model.content.get("dp_world_size") or len(files))
    for rank in range(expected):
        if rank not in files:
            raise DamagedFile(
                file=folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                reason=f"the file of rank {rank} is missing, {expected} ranks saved",
            )
    ranks = [_optimizer_state(files[rank]) for rank in range(expected)]
    if int(ranks[0].get("zero_stage", 1)) > 2:
        raise DamagedFile(
            file=files[0],
            reason="ZeRO-3 wrote it, which partitions parameters",
            fix="Take its weights by DeepSpeed's zero_to_fp32.py and start from them",
        )
    tensors: Tensors = {}
    groups: list[dict[str, Any]] = []
    steps: dict[str, Any] = {}
    for index, shapes in enumerate(model.trained or ()):
        gaps = ranks[0].get("param_alignment_paddings")
        group = FlatGroup(shapes=shapes, gaps=tuple(gaps[index] if gaps else [0] * len(shapes)))
        fp32 = [s["single_partition_of_fp32_groups"][index].detach() for s in ranks]
        _check_size(fp32, group, files[0])
        tensors |= model.masters({name: group.stored(name, fp32) for name in shapes})
        states, hyper = zip(*(_base_state(state, index) for state in ranks), strict=True)
        groups.append(numbers(hyper[0], shapes))
        for slot, value in states[0].items():
            if slot == "step":
                steps |= dict.fromkeys(shapes, value)
            elif scalar(value):
                held = StoredTensor.of(torch.as_tensor(value, dtype=torch.float32))
                tensors |= {f"{slot}/{name}": held for name in shapes}
            else:
                parts = [
                    _part(state, slot, file)
                    for state, file in zip(states, files.values(), strict=False)
                ]
                _check_size(parts, group, files[0])
                tensors |= {f"{slot}/{name}": group.stored(name, parts) for name in shapes}
        if "step" not in states[0] and "step" in hyper[0]:
            steps |= dict.fromkeys(shapes, hyper[0]["step"])
    return tensors, OptimizerFile(groups=groups, steps=steps, scaler=ranks[0].get("loss_scaler"))


def _optimizer_state(path: Path) -> dict[str, Any]:
    content = read_pt(path)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or "single_partition_of_fp32_groups" not in state:
        raise DamagedFile(file=path, reason="it holds no optimizer state of ZeRO-1/2")
    return state


def _base_state(state: Mapping[str, Any], index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One group's states and numbers of one rank."""
    base = state["base_optimizer_state"]
    if isinstance(base, list):
        # `elastic_checkpoint`: a state for each group, and the step beside them.
        step = state.get("base_optimizer_state_step")
        return base[index] if step is None else base[index] | {"step": step}, {}
    group = base["param_groups"][index]
    return base["state"].get(group["params"][0], {}), group


def _part(state: Mapping[str, Any], slot: str, file: Path) -> torch.Tensor:
    if slot not in state:
        raise DamagedFile(file=file, reason=f"it has no {slot}, which the other ranks have")
    return state[slot]


def _check_size(parts: list[torch.Tensor], group: FlatGroup, file: Path) -> None:
    held = sum(part.numel() for part in parts)
    if held < group.numel:
        raise DamagedFile(
            file=file,
            reason=f"it and the other ranks' files hold {held} elements of a param group that "
            f"has {group.numel}",
        )
