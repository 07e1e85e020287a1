"""Reads what DeepSpeed wrote at stage 0: the optimizer's state is in the model's file."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._flat import FlatGroup
from spmdzero.formats.deepspeed._host import OptimizerFile, numbers, scalar
from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._pickles import DamagedFile

Order = Sequence[Sequence[str]]


# What stands before the number of a parameter whose name is not known.
NUMBER = "#"


def read_unsharded(
    model: ModelFile, order: Order | None
) -> tuple[dict[str, StoredTensor], OptimizerFile]:
    """The optimizer states of a torch optimizer, and the masters of a 16-bit one.

    Args:
        model: the model's file.
        order: the parameters' names in each param group, which the file doesn't tell; None takes
            the model's order for a file of one group. Where this is not the order of the file,
            states and masters are named by number, ``#0``, and serve to be looked at.

    Raises:
        DamagedFile: the file has other shapes than the parameters of `order`.
    """
    optimizer = model.content["optimizer"]
    base = optimizer.get("optimizer_state_dict", optimizer)
    saved = base["param_groups"]
    flat = "fp32_groups_flat" in optimizer
    if order is None and len(saved) == 1:
        order = [list(model.parameters)]
    if order is None or not _fits(order, saved, model, flat=flat):
        order = [[f"{NUMBER}{number}" for number in group["params"]] for group in saved]
        tensors, steps = _read_numbered(base, order)
    else:
        read = _read_flat if flat else _read_each
        tensors, steps = read(model, optimizer, base, order)
    groups = [numbers(group, names) for group, names in zip(saved, order, strict=True)]
    scaler = optimizer if "cur_scale" in optimizer else None
    return tensors, OptimizerFile(groups=groups, steps=steps, scaler=scaler)


def _fits(
    order: Order, saved: Sequence[Mapping[str, Any]], model: ModelFile, *, flat: bool
) -> bool:
    if len(order) != len(saved) or any(n not in model.parameters for names in order for n in names):
        return False
    # A flat group counts as one parameter; its elements are compared later.
    pairs = zip(order, saved, strict=True)
    return flat or all(len(names) == len(group["params"]) for names, group in pairs)


def _read_numbered(
    base: Mapping[str, Any], order: Order
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    tensors: dict[str, StoredTensor] = {}
    steps: dict[str, Any] = {}
    for names, group in zip(order, base["param_groups"], strict=True):
        for name, number in zip(names, group["params"], strict=True):
            for slot, value in base["state"].get(number, {}).items():
                if slot == "step":
                    steps[name] = value
                else:
                    held = torch.as_tensor(value).detach()
                    tensors[f"{slot}/{name}"] = StoredTensor.of(held)
    return tensors, steps


def _read_each(
    model: ModelFile, optimizer: Mapping[str, Any], base: Mapping[str, Any], order: Order
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """A state for each parameter, and with 16-bit parameters an fp32 copy of each."""
    tensors: dict[str, StoredTensor] = {}
    steps: dict[str, Any] = {}
    for index, (names, group) in enumerate(zip(order, base["param_groups"], strict=True)):
        if "fp32_groups" in optimizer:
            copies = zip(names, optimizer["fp32_groups"][index], strict=True)
            tensors |= model.masters(
                {name: StoredTensor.of(copy.detach()) for name, copy in copies}
            )
        for name, number in zip(names, group["params"], strict=True):
            for slot, value in base["state"].get(number, {}).items():
                if slot == "step":
                    steps[name] = value
                elif scalar(value):
                    held = torch.as_tensor(value, dtype=torch.float32)
                    tensors[f"{slot}/{name}"] = StoredTensor.of(held)
                else:
                    _check_shape(model, name, slot, value)
                    tensors[f"{slot}/{name}"] = StoredTensor.of(value)
    return tensors, steps


def _read_flat(
    model: ModelFile, optimizer: Mapping[str, Any], base: Mapping[str, Any], order: Order
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """A flat tensor for each group: DeepSpeed's fused fp16 optimizer."""
    tensors: dict[str, StoredTensor] = {}
    steps: dict[str, Any] = {}
    for index, (names, group) in enumerate(zip(order, base["param_groups"], strict=True)):
        shapes = {name: tuple(model.parameters[name].shape) for name in names}
        layout = FlatGroup(shapes=shapes, gaps=(0,) * len(shapes))
        flat = {"fp32": optimizer["fp32_groups_flat"][index]}
        flat |= base["state"].get(group["params"][0], {})
        for slot, value in flat.items():
            if slot == "step":
                steps |= dict.fromkeys(names, value)
            elif not scalar(value):
                if value.numel() != layout.numel:
                    raise DamagedFile(
                        file=model.path,
                        reason=f"{slot} of param group {index} has {value.numel()} elements, its "
                        f"parameters have {layout.numel}",
                    )
                stored = {name: layout.stored(name, [value.detach().reshape(-1)]) for name in names}
                if slot == "fp32":
                    tensors |= model.masters(stored)
                else:
                    tensors |= {f"{slot}/{name}": tensor for name, tensor in stored.items()}
    return tensors, steps


def _check_shape(model: ModelFile, name: str, slot: str, value: torch.Tensor) -> None:
    parameter = model.parameters.get(name)
    if parameter is None or parameter.shape != value.shape:
        raise DamagedFile(
            file=model.path,
            reason=f"{slot} of {name} has shape {list(value.shape)}, the parameter "
            f"{'is missing' if parameter is None else list(parameter.shape)}",
            fix="Pass the same param groups, in the same order, as the run that saved it",
        )
