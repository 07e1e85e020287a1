"""Reads DeepSpeed's universal format: a folder for each parameter, a file for each state."""

from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._host import OptimizerFile, numbers, scalar
from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._pickles import DamagedFile, read_pt

STATES = "zero"
GLOBAL_STATE = "optimizer_state.pt"


def read_universal(folder: Path, model: ModelFile) -> tuple[dict[str, StoredTensor], OptimizerFile]:
    """The masters and the optimizer states of every trained parameter.

    Raises:
        DamagedFile: a file is missing, can't be read, or holds another shape.
    """
    shared = read_pt(folder / STATES / GLOBAL_STATE)
    tensors: dict[str, StoredTensor] = {}
    steps: dict[str, Any] = {}
    trained = model.trained
    if trained is None:
        raise DamagedFile(file=model.path, reason="it names no trained parameters (param_shapes)")
    found = {name: _states(folder / STATES / name) for shapes in trained for name in shapes}
    for shapes in trained:
        _require_alike({name: found[name] for name in shapes}, folder)
        for name, shape in shapes.items():
            states = found[name]
            if "step" in states:
                steps[name] = states.pop("step")
            stored = {
                slot: _whole(value, shape, folder, name, slot) for slot, value in states.items()
            }
            tensors |= model.masters({name: stored.pop("fp32")})
            tensors |= {f"{slot}/{name}": tensor for slot, tensor in stored.items()}
    hyper = shared.get("param_groups") or [{} for _ in trained]
    groups = [numbers(group, shapes) for group, shapes in zip(hyper, trained, strict=True)]
    return tensors, OptimizerFile(groups=groups, steps=steps, scaler=shared.get("loss_scaler"))


def _require_alike(group: dict[str, dict[str, Any]], folder: Path) -> None:
    """Every parameter of a group has the same states: one that is missing was lost."""
    slots = {slot for states in group.values() for slot in states} | {"fp32"}
    for name, states in group.items():
        for slot in sorted(slots - states.keys()):
            raise DamagedFile(
                file=folder / STATES / name / f"{slot}.pt",
                reason="there is no such file, and the checkpoint needs it",
            )


def _states(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise DamagedFile(file=folder, reason="the folder of a trained parameter is missing")
    found = {path.stem: read_pt(path) for path in sorted(folder.glob("*.pt"))}
    return {
        slot: value["param"] if isinstance(value, dict) and "param" in value else value
        for slot, value in found.items()
    }


def _whole(value: Any, shape: tuple[int, ...], folder: Path, name: str, slot: str) -> StoredTensor:
    if slot != "fp32" and scalar(value):
        return StoredTensor.of(torch.as_tensor(value, dtype=torch.float32))
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        raise DamagedFile(
            file=folder / STATES / name / f"{slot}.pt",
            reason=f"it is {getattr(value, 'shape', type(value).__name__)} where the model file "
            f"says {list(shape)}",
        )
    return StoredTensor.of(value)
