"""Reads the files of DeepSpeed's ranks under ZeRO-3: each has a part of every parameter."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._flat import PartitionedGroup
from spmdzero.formats.deepspeed._model_file import ModelFile, model_content, trained_shapes
from spmdzero.formats.deepspeed._optimizer import MASTER, STEP, SavedOptimizer
from spmdzero.formats.deepspeed._pickles import damaged, read_pt
from spmdzero.formats.deepspeed._rank_files import every_rank, rank_file, rank_files
from spmdzero.formats.deepspeed._universal import STATES, read_universal, universal_states

FLAT_GROUPS, BASE = "fp32_flat_groups", "optimizer_state_dict"


def read_partitioned(
    folder: Path, *, model_rank: int = 0
) -> tuple[ModelFile, SavedOptimizer | None]:
    """The model and the optimizer that the files of a model-parallel rank hold together.

    A stage 3 file holds only a parameter's master: its values, cast to the dtype in which the
    parameter trains, become the parameter.

    Raises:
        SpmdZeroCheckpointError: a rank's file is missing, can't be read, or doesn't fit the others.
    """
    found = rank_files(folder, states="model", model_rank=model_rank)
    if not found:
        raise damaged(
            folder / rank_file(0, states="model", model_rank=model_rank),
            "there is no such file, and the checkpoint needs it",
        )
    first = model_content(next(iter(found.values())))
    models = every_rank(folder, first.get("dp_world_size"), states="model", model_rank=model_rank)
    ranks = len(models)
    contents = [model_content(file) for file in models]
    trained = trained_shapes(contents[0])
    if trained is None:
        return _model(models, contents, {}), None
    shapes = {name: shape for group in trained for name, shape in group.items()}
    if (folder / STATES).is_dir():
        if int(first.get("mp_world_size") or 1) > 1:
            raise damaged(
                models[0],
                f"it is a universal checkpoint of stage 3 over {first['mp_world_size']} "
                "model-parallel ranks, whose weights are in no file of a rank",
                "Load the checkpoint from which DeepSpeed's converter made it",
            )
        states = universal_states(folder, trained)
        masters = {
            name: dataclasses.replace(StoredTensor.of(states[name][MASTER]), shape=shape)
            for name, shape in shapes.items()
        }
        model = _model(models, contents, masters)
        return model, read_universal(folder, model, states)
    groups = [PartitionedGroup(shapes=group, ranks=ranks) for group in trained]
    files = every_rank(folder, ranks, model_rank=model_rank)
    optimizers = [_optimizer_state(file, groups) for file in files]
    masters = {
        name: group.stored(name, [state[FLAT_GROUPS][index] for state in optimizers])
        for index, group in enumerate(groups)
        for name in group.shapes
    }
    model = _model(models, contents, masters)
    return model, _optimizer(model, optimizers, groups, files)


def _optimizer(
    model: ModelFile,
    ranks: Sequence[Mapping[str, Any]],
    groups: Sequence[PartitionedGroup],
    files: Sequence[Path],
) -> SavedOptimizer:
    saved = SavedOptimizer(model=model, scaler=ranks[0].get("loss_scaler"))
    for numbers in ranks[0][BASE]["param_groups"]:
        # torch numbers the flat tensors, and a param group has one for each of its sub-groups.
        own = [index for index in numbers["params"] if index < len(groups)]
        names = [name for index in own for name in groups[index].shapes]
        for index in own:
            slots = [
                {MASTER: rank[FLAT_GROUPS][index], **rank[BASE]["state"].get(index, {})}
                for rank in ranks
            ]
            saved.add_flat(groups[index], slots, files=files)
        if STEP in numbers and not saved.steps.keys() & set(names):
            saved.steps |= dict.fromkeys(names, numbers[STEP])
        saved.add_group(numbers, names)
    return saved


def _optimizer_state(path: Path, groups: Sequence[PartitionedGroup]) -> dict[str, Any]:
    content = read_pt(path)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or FLAT_GROUPS not in state or BASE not in state:
        raise damaged(path, "it holds no optimizer state of ZeRO-3")
    if state.get("ds_zero_partition_groups") is not None:
        raise damaged(
            path,
            "a mixture of experts wrote it, whose parameters are cut by expert",
            "spmdzero is data-parallel: save the model from DeepSpeed as one state dict",
        )
    flat = [tensor.detach().reshape(-1) for tensor in state[FLAT_GROUPS]]
    sizes = [group.numel // group.ranks for group in groups]
    if [tensor.numel() for tensor in flat] != sizes:
        held = [tensor.numel() for tensor in flat]
        raise damaged(
            path,
            f"its flat groups have {held} elements, a rank's parts of the parameters {sizes}",
            "Where the optimizer is offloaded to NVMe its states are in other files. Convert the "
            "checkpoint to DeepSpeed's universal format there, and load that"
            if 0 in held
            else "Load all files of one checkpoint, as the ranks wrote it",
        )
    return {**state, FLAT_GROUPS: flat}


def _model(
    files: Sequence[Path],
    contents: Sequence[Mapping[str, Any]],
    masters: Mapping[str, StoredTensor],
) -> ModelFile:
    """The model file that all ranks' files form together.

    Args:
        files, contents: of each rank.
        masters: the trained parameters by name, in the dtype of the optimizer.
    """
    content = contents[0]
    module, tied = content["module"], dict(content.get("shared_params") or {})
    buffer_names = set(content.get("buffer_names") or ())
    parameters = _frozen(files, contents)
    for name, master in masters.items():
        held = module.get(name)
        if not isinstance(held, torch.Tensor):
            raise damaged(files[0], f"its module has no {name}, which the optimizer trains")
        parameters[name] = master.as_dtype(held.dtype)
    tensors = {k: value for k, value in module.items() if isinstance(value, torch.Tensor)}
    # Tensors that ZeRO-3 doesn't partition are whole in the file, all others are empty.
    own = tensors.keys() - buffer_names - parameters.keys() - tied.keys()
    parameters |= {k: StoredTensor.of(tensors[k]) for k in own if tensors[k].numel()}
    return ModelFile(
        path=files[0],
        content=content,
        parameters={name: parameters[name] for name in module if name in parameters},
        buffers={k: StoredTensor.of(tensors[k]) for k in tensors if k in buffer_names},
        tied=tied,
        extra={k: value for k, value in module.items() if k not in tensors},
    )


def _frozen(
    files: Sequence[Path], contents: Sequence[Mapping[str, Any]]
) -> dict[str, StoredTensor]:
    shapes = contents[0].get("frozen_param_shapes") or {}
    group = PartitionedGroup(
        shapes={name: tuple(shape) for name, shape in shapes.items()}, ranks=len(contents)
    )
    found = {}
    for name, (start, stop) in group.places.items():
        parts = []
        for file, content in zip(files, contents, strict=True):
            part = (content.get("frozen_param_fragments") or {}).get(name)
            if part is None or part.numel() != stop - start:
                held = "no part" if part is None else f"{part.numel()} elements"
                raise damaged(
                    file,
                    f"it has {held} of {name}, whose {math.prod(shapes[name])} elements are "
                    f"{stop - start} to each of {len(contents)} ranks",
                )
            parts.append(part.detach().reshape(-1))
        found[name] = dataclasses.replace(group, shapes={name: group.shapes[name]}).stored(
            name, parts
        )
    return found
