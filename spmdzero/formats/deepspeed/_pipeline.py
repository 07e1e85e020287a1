"""Reads what a pipeline of DeepSpeed wrote: a file for each layer, states by pipeline stage."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats.deepspeed._model_file import ModelFile, model_file, trained_shapes
from spmdzero.formats.deepspeed._optimizer import Order, SavedOptimizer
from spmdzero.formats.deepspeed._pickles import damaged, read_pt
from spmdzero.formats.deepspeed._rank_files import read_ranks

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


def read_pipeline(
    folder: Path,
    layers: Mapping[int, Path],
    order: Order | None,
    *,
    unsharded: Callable[[ModelFile, Order | None], SavedOptimizer],
    universal: bool,
) -> Found:
    """The model, and its optimizer, of all pipeline stages together.

    Names are those of a `PipelineModule`: a layer's number, or ``tied_modules`` and its key.

    Args:
        folder, order: as of `read`.
        layers: as of `layer_files`.
        unsharded: reads the optimizer of ZeRO stage 0.
        universal: whether the optimizer is in the universal format, and read elsewhere.

    Raises:
        SpmdZeroCheckpointError: a file is missing or damaged, or the files don't fit together.
    """
    paths = [folder / model_file()]
    contents = [read_pt(paths[0])]
    for stage in range(1, int(contents[0].get("mp_world_size") or 1)):
        paths.append(folder / model_file(stage))
        contents.append(read_pt(paths[-1]))
    shapes: dict[str, tuple[int, ...] | None] = {}
    for content in contents:
        groups = [*(trained_shapes(content) or ()), content.get("frozen_param_shapes") or {}]
        shapes |= {name: tuple(shape) for group in groups for name, shape in group.items()}
    if not shapes and order is not None:
        shapes = {name: None for names in order for name in names}
    module = _module(layers, shapes)
    whole: dict[str, Any] = {**contents[0], "module": module}
    whole["buffer_names"] = [name for each in contents for name in each.get("buffer_names") or ()]
    if contents[0].get("param_shapes") is not None:
        whole["param_shapes"] = _together(contents, paths)
    model = ModelFile.of(paths[0], whole)
    if universal:
        return model, None
    if model.trained is None:
        if contents[0].get("optimizer") is None:
            return model, None
        if len(contents) > 1:
            reason = "ZeRO stage 0 doesn't save which parameters a pipeline stage has"
            raise damaged(
                paths[1], reason, "Load it with load_module_only=True, or save at stage 1"
            )
        return model, unsharded(model, order)
    saved = [
        read_ranks(folder, ModelFile.of(path, {**content, "module": module}), model_rank=stage)
        for stage, (path, content) in enumerate(zip(paths, contents, strict=True))
    ]
    tensors = {key: tensor for each in saved for key, tensor in each.tensors.items()}
    steps = {name: step for each in saved for name, step in each.steps.items()}
    groups = [
        {**mine[0], "params": list(dict.fromkeys(n for group in mine for n in group["params"]))}
        for mine in zip(*(each.groups for each in saved), strict=True)
    ]
    return model, dataclasses.replace(
        saved[0], model=model, tensors=tensors, steps=steps, groups=groups
    )


def _together(contents: list[Any], paths: list[Path]) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the trained parameters of all pipeline stages, for each param group."""
    each = [trained_shapes(content) or [] for content in contents]
    for path, groups in zip(paths, each, strict=True):
        if len(groups) != len(each[0]):
            reason = f"it has {len(groups)} param groups, the first pipeline stage {len(each[0])}"
            raise damaged(path, reason)
    return [
        {name: shape for group in mine for name, shape in group.items()}
        for mine in zip(*each, strict=True)
    ]


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
