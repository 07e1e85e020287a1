"""Reads DeepSpeed's universal format: a folder per parameter, with a file per state."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._optimizer import MASTER, STEP, SavedOptimizer
from spmdzero.formats.deepspeed._pickles import damaged, read_pt

STATES = "zero"
GLOBAL_STATE = "optimizer_state.pt"
_States = Mapping[str, Mapping[str, Any]]


def universal_states(
    folder: Path, trained: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, dict[str, Any]]:
    """Name of a parameter -> slot -> its state; `MASTER` is the slot of the master.

    Args:
        folder: of the tag.
        trained: the shapes of the trained parameters, in groups with the same states.

    Raises:
        SpmdZeroCheckpointError: a file is missing or can't be read.
    """
    every: dict[str, dict[str, Any]] = {}
    for shapes in trained:
        found = {name: _states(folder / STATES / name, shapes[name]) for name in shapes}
        # All parameters of a group have the same states: a missing one was lost.
        slots = {slot for states in found.values() for slot in states} | {MASTER}
        for name, states in found.items():
            for slot in sorted(slots - states.keys()):
                file = folder / STATES / name / f"{slot}.pt"
                raise damaged(file, "there is no such file, and the checkpoint needs it")
        every |= found
    return every


def read_universal(folder: Path, model: ModelFile, states: _States) -> SavedOptimizer:
    """The masters and the optimizer states of every trained parameter.

    Args:
        folder: of the tag.
        model: the model's file, with trained parameters.
        states: the result of `universal_states`.

    Raises:
        SpmdZeroCheckpointError: a file is missing, can't be read, or has a wrong shape.
    """
    shared = read_pt(folder / STATES / GLOBAL_STATE)
    trained = model.trained or []
    saved = SavedOptimizer(model=model, scaler=shared.get("loss_scaler"))
    # For stage 3 only this file has the count of updates, the same for all.
    base = (shared.get("optimizer_state_dict") or {}).get("state") or {}
    shares = {key: value for each in base.values() for key, value in each.items() if key == STEP}
    for place, group in enumerate(shared.get("param_groups") or [{} for _ in trained]):
        # At stage 3 a param group has several flat tensors, which torch numbers.
        places = [index for index in group.get("params", [place]) if index < len(trained)]
        names = [name for index in places for name in trained[index]]
        for name in names:
            for slot, value in (shares | dict(states[name])).items():
                saved.add(name, {slot: value}, file=folder / STATES / name / f"{slot}.pt")
        saved.add_group(group, names)
    return saved


def _states(folder: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    if not folder.is_dir():
        raise damaged(folder, "the folder of a trained parameter is missing")
    found = {path.stem: read_pt(path) for path in sorted(folder.glob("*.pt"))}
    return {slot: _of_shape(value, shape) for slot, value in found.items()}


def _of_shape(value: Any, shape: tuple[int, ...]) -> Any:
    value = value["param"] if isinstance(value, dict) and "param" in value else value
    # DeepSpeed's converter leaves tensors that stage 3 saved flat as they are.
    flat = isinstance(value, torch.Tensor) and value.dim() == 1
    return value.view(shape) if flat and value.numel() == math.prod(shape) else value
