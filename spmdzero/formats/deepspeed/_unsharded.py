"""Reads DeepSpeed's stage 0, where the model's file has the optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmdzero.formats.deepspeed._flat import FlatGroup
from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._optimizer import MASTER, NUMBER, Order, SavedOptimizer


def read_unsharded(model: ModelFile, order: Order | None) -> SavedOptimizer:
    """The states of a torch optimizer, and the masters of a 16-bit one.

    Args:
        model: the model's file.
        order: the parameters' names in each param group, which the file doesn't have; None takes
            the model's order for a file with one group. If this is not the order of the file,
            states and masters are named by number, ``#0``, which suffices to look at them.

    Raises:
        SpmdZeroCheckpointError: the file has other shapes than the parameters of `order`.
    """
    optimizer = model.content["optimizer"]
    base = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = base["param_groups"], base["state"]
    # DeepSpeed's fused fp16 optimizer has a flat tensor per group. Others have one state per
    # parameter and, for 16-bit parameters, an fp32 copy of each.
    flat, copies = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    if order is None and len(groups) == 1:
        order = [list(model.parameters)]
    if order is None or not _fits(order, groups, model, flat=flat is not None):
        order = [[f"{NUMBER}{number}" for number in group["params"]] for group in groups]
        flat = copies = None
    saved = SavedOptimizer(model=model, scaler=optimizer if "cur_scale" in optimizer else None)
    for index, (names, group) in enumerate(zip(order, groups, strict=True)):
        saved.add_group(group, names)
        if flat is not None:
            shapes = {name: model.parameters[name].shape for name in names}
            layout = FlatGroup(shapes=shapes, gaps=(0,) * len(shapes))
            slots = {MASTER: flat[index], **states.get(group["params"][0], {})}
            saved.add_flat(layout, [slots], files=[model.path])
            continue
        for place, (name, number) in enumerate(zip(names, group["params"], strict=True)):
            own = {MASTER: copies[index][place]} if copies is not None else {}
            saved.add(name, own | states.get(number, {}), file=model.path)
    return saved


def _fits(
    order: Order, saved: Sequence[Mapping[str, Any]], model: ModelFile, *, flat: bool
) -> bool:
    if len(order) != len(saved) or any(n not in model.parameters for names in order for n in names):
        return False
    # A flat group counts as one parameter; its elements are compared later.
    pairs = zip(order, saved, strict=True)
    return flat or all(len(names) == len(group["params"]) for names, group in pairs)
