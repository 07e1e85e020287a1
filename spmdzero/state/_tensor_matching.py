"""Matches saved tensors with an engine's tensors, and refuses a state that doesn't fit."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch

from spmdzero._names import listed
from spmdzero.backend import arrays
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import Box, StoredTensor, TrainingState, box_shape
from spmdzero.state._live_state import (
    ACCUMULATOR,
    Held,
    device_boxes,
    held_tensors,
)
from spmdzero.state._training import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The tensors that a non-strict load left out.

    Attributes:
        missing: names of the module's parameters and buffers that the checkpoint doesn't have.
        unexpected: names of the checkpoint's tensors that the module doesn't have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor of the engine, and the source of its new value.

    Attributes:
        held: the engine's tensor.
        source: the saved tensor's name.
        read: a part -> its value, on the CPU.
        saved_parts: a part -> the parts of the saved tensor from which it is made.
    """

    held: Held
    source: str
    read: Callable[[Box], torch.Tensor]
    saved_parts: Callable[[Box], list[Box]]

    @cached_property
    def boxes(self) -> list[tuple[Box, ...]]:
        """The parts of the tensor that each local device holds."""
        held = self.held
        return list(device_boxes(held.shape, held.layout, arrays.local_slices(held.stored)))


def needed_parts(targets: Iterable[Target]) -> dict[str, list[Box]]:
    """Name of a saved tensor -> the parts of it that these targets read."""
    parts: dict[str, dict[Box, None]] = {}
    for target in targets:
        needed = parts.setdefault(target.source, {})
        for box in {box: None for boxes in target.boxes for box in boxes}:
            needed.update(dict.fromkeys(target.saved_parts(box)))
    return {name: list(needed) for name, needed in parts.items()}


def match(
    training: Training, state: TrainingState, *, strict: bool, module: bool, optimizer: bool
) -> tuple[list[Target], LoadReport]:
    """The source of each of the engine's tensors.

    Args:
        training: the engine's training.
        state: the saved state.
        strict: whether names of the module must match.
        module: whether parameters and buffers are wanted.
        optimizer: whether masters, optimizer states and gradients are wanted.

    Raises:
        SpmdZeroCheckpointError: the state has a different model, optimizer or moment of a step.
    """
    held = held_tensors(training)
    report = _compare(state, held)
    if strict and module and (report.missing or report.unexpected):
        raise _misfit(
            state,
            f"is of another model: missing {listed(report.missing, most=8) or 'nothing'}, "
            f"unexpected {listed(report.unexpected, most=8) or 'nothing'}",
            fix="load_module_strict=False loads what fits",
        )
    if optimizer:
        _require_same_optimizer(training, state, held)
    targets = []
    for name, item in held.items():
        role, _, own = name.partition("/")
        if role == ACCUMULATOR.rstrip("/"):
            if optimizer and state.host.accumulation is not None:
                targets += _gradient(training, state, name, item)
            continue
        source = name
        if role in ("parameter", "buffer"):
            if not module or name not in state.tensors:
                continue
            source = _weight(state, name, own, item) if role == "parameter" else name
        elif not optimizer:
            continue
        elif role == "master" and name not in state.tensors:
            source = f"parameter/{own}"
        targets.append(_plain(state, state.tensors[source], source, item, own))
    return targets, report


def _compare(state: TrainingState, held: Mapping[str, Held]) -> LoadReport:
    roles = ("parameter/", "buffer/")
    here = {name for name in held if name.startswith(roles)}
    saved = {name for name in state.tensors if name.startswith(roles)}
    left_out = {f"parameter/{name}" for name in state.host.excluded}
    return LoadReport(
        missing=tuple(sorted(name.split("/", 1)[1] for name in here - saved - left_out)),
        unexpected=tuple(sorted(name.split("/", 1)[1] for name in saved - here)),
    )


def _weight(state: TrainingState, name: str, own: str, item: Held) -> str:
    """Name of the saved tensor for a parameter: that of its dtype, else the most exact one."""
    saved, master = state.tensors[name], f"master/{own}"
    if saved.dtype != item.stored.dtype and master in state.tensors:
        return master
    return name


def _plain(state: TrainingState, saved: StoredTensor, source: str, item: Held, own: str) -> Target:
    if saved.shape != item.shape:
        raise _misfit(
            state,
            f"is of another model: {source} has shape {list(saved.shape)}, the engine's {own} "
            f"{list(item.shape)}",
            fix="Build the model that was saved",
        )
    return Target(
        held=item,
        source=source,
        read=saved.read,
        saved_parts=lambda box: [box],
    )


def _require_same_optimizer(
    training: Training, state: TrainingState, held: Mapping[str, Held]
) -> None:
    without = "load_optimizer_states=False loads the rest"
    saved_groups = state.host.param_groups
    if saved_groups is None:
        raise _misfit(state, "holds no optimizer states", fix=without)
    groups = training.group_names
    saved = [group.get("params", own) for group, own in zip(saved_groups, groups, strict=False)]
    if saved != groups or len(saved_groups) != len(groups):
        raise _misfit(state, "has other param groups than the engine's optimizer", fix=without)
    rest = ("parameter", "buffer", "master", ACCUMULATOR.rstrip("/"))
    here = {name for name in held if _role(name) not in rest}
    there = {name for name in state.tensors if _role(name) not in rest}
    if here != there:
        kept, wanted = (
            ", ".join(sorted(set(map(_role, names)))) or "no states" for names in (there, here)
        )
        raise _misfit(
            state,
            f"was saved with another optimizer: it has {kept}, the engine's keeps {wanted} (the "
            f"first that differs: {min(here ^ there)})",
            fix=without,
        )


def _role(name: str) -> str:
    return name.partition("/")[0]


def _gradient(training: Training, state: TrainingState, name: str, item: Held) -> list[Target]:
    """The gradient of an unfinished step, in the engine's waiting form.

    Partials of the same number are loaded one by one. For any other form they are summed in fp32,
    in the order of the devices; if the engine has partials, the first is the sum and the others are
    0.
    """
    accumulation = state.host.accumulation
    assert accumulation is not None
    if accumulation["steps"] != training.batch.accumulation:
        raise _misfit(
            state,
            f"stands in the middle of a step of {accumulation['steps']} micro-batches, the engine "
            f"has {training.batch.accumulation}",
            fix='Set "gradient_accumulation_steps" as it was, or load_optimizer_states=False',
        )
    own = name.removeprefix(ACCUMULATOR)
    shape, saved = training.plan[own].shape, state.tensors[name]
    rows = saved.shape[0] if len(saved.shape) > len(shape) else 0
    partial = item.layout is not None and item.layout.kind == "partial"
    unit = training.gradients.path.unit if partial else 1.0
    if partial and saved.shape == item.shape and unit == accumulation["unit"]:
        return [Target(held=item, source=name, read=saved.read, saved_parts=lambda box: [box])]

    def summands(box: Box) -> list[Box]:
        return [((row, row + 1), *box) for row in range(rows)] if rows else [box]

    def total(box: Box) -> torch.Tensor:
        parts = [saved.read(part).float() for part in summands(box)]
        result = sum(parts[1:], start=parts[0]) * (accumulation["unit"] / unit)
        return result.reshape(box_shape(box))

    def read(box: Box) -> torch.Tensor:
        (first, _), *inside = box
        if first == 0:
            return total(tuple(inside))[None]
        return torch.zeros(box_shape(box), dtype=torch.float32)

    return [
        Target(
            held=item,
            source=name,
            read=read if partial else total,
            saved_parts=(lambda box: summands(box[1:])) if partial else summands,
        )
    ]


def _misfit(state: TrainingState, reason: str, *, fix: str) -> SpmdZeroCheckpointError:
    return SpmdZeroCheckpointError(file=state.source, reason=reason, fix=fix)
