"""The config of an explained step: a Trainer's config has "auto" in place of its arguments."""

import os
from typing import Any

import torch

from spmdzero.backend import choose, map_tensors, runtime
from spmdzero.config import (
    NO_MEANING,
    SpmdZeroConfig,
    backend_of,
    load_config,
    mesh_axes_of,
    read,
    with_stand_ins,
)
from spmdzero.explain._trace import Batch
from spmdzero.plan import MeshSpec

_ROWS, _ALL_ROWS = "train_micro_batch_size_per_gpu", "train_batch_size"
_NUMBERS = ("optimizer.params.", "scheduler.params.")
# The optimizer of transformers' Trainer if its config names none; its states take memory.
_OPTIMIZER = {"type": "AdamW"}


def settings_of(
    config: str | os.PathLike[str] | dict[str, Any], batch: Batch
) -> tuple[SpmdZeroConfig, tuple[str, ...]]:
    """The checked config, and a sentence for each value that replaces an "auto".

    The rows of the batch are those of a micro-batch. It also chooses the process's backend.

    Raises:
        SpmdZeroConfigError: as in `load_config`.
    """
    given = read(config)
    choose(backend_of(given))
    filled, read_as = with_stand_ins(given)
    if read_as.keys() & {_ROWS, _ALL_ROWS} and not filled.keys() & {_ROWS, _ALL_ROWS}:
        spec = MeshSpec.resolve(mesh_axes_of(given), device_count=runtime.device_count())
        filled[_ROWS] = _rows(batch) // spec.replicas
        read_as.pop(_ALL_ROWS, None)
        read_as[_ROWS] = f"{filled[_ROWS]}, the rows of the batch on a device"
    numbers = [key for key in read_as if key.startswith(_NUMBERS)]
    if "gradient_accumulation_steps" in read_as and _ALL_ROWS not in filled:
        read_as["gradient_accumulation_steps"] = "1"
    notes = [
        f'"auto": {key} is read as {value} (--set {key}=...)'
        for key, value in read_as.items()
        if key not in numbers and key not in NO_MEANING
    ]
    if numbers:
        notes.append(f'"auto": memory and time don\'t depend on {", ".join(numbers)}')
    if read_as and "optimizer" not in filled:
        filled["optimizer"] = _OPTIMIZER
        notes.append("no optimizer is named: AdamW, as transformers' Trainer takes")
    return load_config(filled), tuple(notes)


def _rows(batch: Batch) -> int:
    tensors: list[torch.Tensor] = []
    map_tensors(batch, lambda _, tensor: tensors.append(tensor) or tensor)
    return tensors[0].shape[0]
