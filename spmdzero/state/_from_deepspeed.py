"""Opens a checkpoint for a running engine, and completes one that DeepSpeed wrote."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from spmdzero.backend import runtime
from spmdzero.formats import HostState, StoredTensor, TrainingState, format_of, open_state
from spmdzero.optim import DeepSpeedSchedule
from spmdzero.state._training import Training
from spmdzero.step._optimizer import ZeroOptimizer


def open_for(training: Training, folder: Path, tag: str) -> TrainingState:
    """Opens the state saved as `tag`, with the order and the slots of `training`.

    Raises:
        SpmdZeroCheckpointError: the checkpoint is damaged or missing.
    """
    order = training.group_names
    filled = [names for names in order if names]
    state = open_state(folder, tag, process=runtime.process_index(), order=filled)
    if training.optimizer is None or state.host.param_groups is None:
        return state
    host = dataclasses.replace(state.host, param_groups=_aligned(state.host.param_groups, order))
    state = dataclasses.replace(state, host=host)
    if format_of(folder / tag) == "native":
        return state
    if host.applied is None:
        # torch's SGD doesn't count its steps.
        applied = host.counters.get("global_steps", 0) - host.counters.get("skipped_steps", 0)
        host = dataclasses.replace(host, applied=applied)
    groups = _with_lr(training, host, _in_order(training, host))
    host = dataclasses.replace(host, param_groups=groups)
    unwritten = dict(_unwritten(training, training.optimizer, host))
    return dataclasses.replace(state, host=host, tensors=unwritten | dict(state.tensors))


def _aligned(saved: Sequence[dict[str, Any]], own: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The saved groups, aligned with the engine's if only groups without parameters differ.

    DeepSpeed leaves out empty groups, and a schedule uses the index of a group.

    Args:
        saved: the groups of a checkpoint.
        own: names of the parameters in each of the engine's groups.
    """
    filled = [group for group in saved if group.get("params", True)]
    if len(filled) != len([names for names in own if names]):
        return list(saved)
    rest = iter(filled)
    aligned = []
    for place, names in enumerate(own):
        there = saved[place] if place < len(saved) else {}
        empty = there if not there.get("params", True) else {"params": []}
        aligned.append(next(rest) if names else empty)
    return aligned


def _with_lr(
    training: Training, host: HostState, groups: list[dict[str, Any]] | None
) -> list[dict[str, Any]] | None:
    """The groups with the schedule's lr, if the files have no lr (`elastic_checkpoint`)."""
    schedule = copy.copy(training.lr_scheduler)
    if groups is None or host.scheduler is None or not isinstance(schedule, DeepSpeedSchedule):
        return groups
    schedule.load_state_dict(dict(host.scheduler))
    rates = schedule.get_lr()
    return [{"lr": lr} | group for lr, group in zip(rates, groups, strict=False)]


def _in_order(training: Training, host: HostState) -> list[dict[str, Any]] | None:
    """The saved groups, in the engine's order of parameters if they have the same parameters.

    `round_robin_gradients` shuffles them, and DeepSpeed's files have frozen ones in no group.
    """
    order, plan = training.group_names, training.plan
    if host.param_groups is None or len(host.param_groups) != len(order):
        return host.param_groups
    groups = []
    for group, names in zip(host.param_groups, order, strict=True):
        trained = {name for name in names if plan[name].trainable}
        same = set(group["params"]) in (trained, set(names))
        groups.append(group | {"params": names} if same else group)
    return groups


def _unwritten(
    training: Training, optimizer: ZeroOptimizer, host: HostState
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields states that DeepSpeed leaves out: those before the first update, and step counts."""
    if host.applied is None:
        return
    groups = zip(optimizer._rules, optimizer.param_groups, training.group_names, strict=True)
    for rule, group, names in groups:
        for name in names:
            if not training.plan[name].trainable:
                continue
            if "step" in rule.scalars:
                step = torch.tensor(host.applied, dtype=torch.float32)
                yield f"step/{name}", StoredTensor.of(step)
            plan = training.plan
            for slot in plan[name].moments(plan.moments) if host.applied == 0 else ():
                shape = plan.at_rest(f"{slot}/{name}").shape
                first = torch.full(shape, rule.initial(slot, group), dtype=torch.float32)
                yield f"{slot}/{name}", StoredTensor.of(first)
