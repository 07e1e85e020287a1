"""Reads DeepSpeed's universal format: a folder for each parameter, a file for each state."""

from pathlib import Path
from typing import Any

from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._optimizer import MASTER, SavedOptimizer
from spmdzero.formats.deepspeed._pickles import damaged, read_pt

STATES = "zero"
GLOBAL_STATE = "optimizer_state.pt"


def read_universal(folder: Path, model: ModelFile) -> SavedOptimizer:
    """The masters and the optimizer states of every trained parameter.

    Raises:
        SpmdZeroCheckpointError: a file is missing, can't be read, or holds another shape.
    """
    shared = read_pt(folder / STATES / GLOBAL_STATE)
    trained = model.trained
    if trained is None:
        raise damaged(model.path, "it names no trained parameters (param_shapes)")
    saved = SavedOptimizer(model=model, scaler=shared.get("loss_scaler"))
    numbers = shared.get("param_groups") or [{} for _ in trained]
    for shapes, group in zip(trained, numbers, strict=True):
        found = {name: _states(folder / STATES / name) for name in shapes}
        # Every parameter of a group has the same states: one that is missing was lost.
        slots = {slot for states in found.values() for slot in states} | {MASTER}
        for name, states in found.items():
            for slot in sorted(slots - states.keys()):
                file = folder / STATES / name / f"{slot}.pt"
                raise damaged(file, "there is no such file, and the checkpoint needs it")
            for slot, value in states.items():
                saved.add(name, {slot: value}, file=folder / STATES / name / f"{slot}.pt")
        saved.add_group(group, shapes)
    return saved


def _states(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise damaged(folder, "the folder of a trained parameter is missing")
    found = {path.stem: read_pt(path) for path in sorted(folder.glob("*.pt"))}
    return {
        slot: value["param"] if isinstance(value, dict) and "param" in value else value
        for slot, value in found.items()
    }
