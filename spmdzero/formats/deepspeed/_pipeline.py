"""Reads what a pipeline of DeepSpeed wrote: a file for each layer, states by pipeline stage."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats.deepspeed._model_file import ModelFile, model_file, trained_shapes
from spmdzero.formats.deepspeed._optimizer import Order, SavedOptimizer
from spmdzero.formats.deepspeed._pickles import damaged, read_pt

Found = tuple[ModelFile, SavedOptimizer | None]
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_TIED = "tied_modules."


def layer_files(folder: Path) -> dict[int, Path]:
    """Number of a layer -> its file, in order; empty where no pipeline wrote the folder.

    Raises:
        SpmdZeroCheckpointError: layers are split over model-parallel ranks.
    """
    found = {}
    for path in folder.glob("layer_*-model_states.pt"):
        if name := _LAYER.fullmatch(path.name):
            if int(name[2] or 0):
                reason = "each layer is split over ranks of tensor parallelism in the pipeline"
                fix = "Save the model from DeepSpeed as one state dict"
                raise damaged(path, reason, fix)
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def read_stages(folder: Path, layers: Mapping[int, Path], order: Order | None) -> list[ModelFile]:
    """The model file of each pipeline stage: each has the whole module, and says what it trains.

    Names are those of a `PipelineModule`: a layer's number, or ``tied_modules`` and its key.

    Args:
        folder, order: as of `read`.
        layers: as of `layer_files`.

    Raises:
        SpmdZeroCheckpointError: a file is missing or damaged, or the files don't fit together.
    """
    paths = [folder / model_file()]
    contents = [read_pt(paths[0])]
    for stage in range(1, int(contents[0].get("mp_world_size") or 1)):
        paths.append(folder / model_file(stage))
        contents.append(read_pt(paths[-1]))
    shapes: dict[str, tuple[int, ...] | None] = {}
    for path, content in zip(paths, contents, strict=True):
        trained = trained_shapes(content)
        if trained is None and len(paths) > 1 and content.get("optimizer") is not None:
            reason = "ZeRO stage 0 doesn't save which parameters a pipeline stage has"
            raise damaged(path, reason, "Save it from DeepSpeed at ZeRO stage 1")
        groups = [*(trained or ()), content.get("frozen_param_shapes") or {}]
        shapes |= {name: tuple(shape) for group in groups for name, shape in group.items()}
    if not shapes and order is not None:
        shapes = {name: None for names in order for name in names}
    buffers = [name for content in contents for name in content.get("buffer_names") or ()]
    whole = {"module": _module(layers, shapes), "buffer_names": buffers}
    return [
        ModelFile.of(path, content | whole) for path, content in zip(paths, contents, strict=True)
    ]


def joined(found: Sequence[Found]) -> Found:
    """The model and the optimizer of all pipeline stages together.

    Raises:
        SpmdZeroCheckpointError: the stages have other numbers of param groups.
    """
    first, saved = found[0][0], [optimizer for _, optimizer in found if optimizer is not None]
    trained = [model.trained for model, _ in found if model.trained is not None]
    for model, _ in found:
        groups, wanted = len(model.trained or ()), len(first.trained or ())
        if groups != wanted:
            reason = f"it has {groups} param groups, and the first pipeline stage has {wanted}"
            raise damaged(model.path, reason)
    if trained:
        shapes = [
            {name: shape for group in mine for name, shape in group.items()}
            for mine in zip(*trained, strict=True)
        ]
        first = dataclasses.replace(first, content={**first.content, "param_shapes": shapes})
    if not saved:
        return first, None
    return first, dataclasses.replace(
        saved[0],
        model=first,
        tensors={key: tensor for each in saved for key, tensor in each.tensors.items()},
        steps={name: step for each in saved for name, step in each.steps.items()},
        groups=[
            {**mine[0], "params": list(dict.fromkeys(n for group in mine for n in group["params"]))}
            for mine in zip(*(each.groups for each in saved), strict=True)
        ],
    )


def _module(
    layers: Mapping[int, Path], shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, Any]:
    """The state dict of the module, of those of its layers."""
    tied = _Tied(shapes)
    made: dict[str, Any] = {}
    for number, path in layers.items():
        state = read_pt(path)
        if not isinstance(state, dict):
            raise damaged(path, "it holds no layer's state dict")
        prefix = f"{number}."
        if state and not any(name.startswith(prefix) for name in shapes):
            prefix = tied.prefix(state, path) or prefix
        made |= {f"{prefix}{name}": value for name, value in state.items()}
    return made


class _Tied:
    """The tied layers, whose files have numbers of layers and not their keys."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
        self._wanted: dict[str, dict[str, tuple[int, ...] | None]] = {}
        for name, shape in shapes.items():
            if name.startswith(_TIED):
                key, _, rest = name.removeprefix(_TIED).partition(".")
                self._wanted.setdefault(f"{_TIED}{key}.", {})[rest] = shape
        self._known: dict[str, Mapping[str, Any]] = {}

    def prefix(self, state: Mapping[str, Any], path: Path) -> str | None:
        """The start of the names in a layer's file; None if it is no tied layer.

        A key is found at its first layer, and each later one has the same values.
        """
        fitting = [at for at, wanted in self._wanted.items() if _fits(state, wanted)]
        for at in fitting:
            if at in self._known and _equal(state, self._known[at]):
                return at
        for at in fitting:
            if at not in self._known:
                self._known[at] = state
                return at
        if fitting:
            raise damaged(path, f"it differs from the other layer that is tied as {fitting[0]}*")
        return None


def _fits(state: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...] | None]) -> bool:
    return all(
        name in state and (shape is None or tuple(state[name].shape) == shape)
        for name, shape in wanted.items()
    )


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = [(value, other.get(name)) for name, value in one.items()]
    return all(
        isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
        for a, b in pairs
    )
