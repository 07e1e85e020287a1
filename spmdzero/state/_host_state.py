"""Saves and loads the part of an engine's state that is no tensor on the devices."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero._logging import is_new
from spmdzero._names import listed
from spmdzero.data._seeds import generators
from spmdzero.formats import RESET_AT, HostState, portable
from spmdzero.state._training import Training
from spmdzero.step._numbers import numbers_at, take_over_numbers
from spmdzero.step._optimizer import ZeroOptimizer
from spmdzero.step._schedule_hold import ScheduleHold

logger = logging.getLogger("spmdzero")


def host_state(
    training: Training, *, exclude_frozen: bool, client_state: Mapping[str, Any]
) -> HostState:
    """The engine's state on the host; reads two scalars, and the losses of an unfinished step.

    Raises:
        SpmdZeroUsageError: gradients wait where they can't be saved.
    """
    optimizer, waiting = training.optimizer, training.gradients.summed()
    schedule: Any = training.lr_scheduler
    loader = training.training_dataloader
    frozen = [n for n, p in training.module.named_parameters() if not p.requires_grad]
    state = HostState(
        counters=dataclasses.asdict(training.counters),
        accumulation=_unfinished_step(training, waiting) if waiting else None,
        scheduler=dict(schedule.state_dict()) if hasattr(schedule, "state_dict") else None,
        loader=loader.state_dict() if loader is not None else None,
        rng=generators(),
        extra={key: part.get_extra_state() for key, part in extra_states(training.module)},
        excluded=tuple(frozen) if exclude_frozen else (),
        client_state=dict(client_state),
        tied=_tied_names(training.module),
    )
    if optimizer is None:
        return _portable(state)
    skipped = optimizer.skipped_steps
    training.skips.tell(skipped, step=training.counters.global_steps)
    state = dataclasses.replace(
        state,
        # This is the devices' count: without fp16 the host's own count lags behind.
        counters=dict(state.counters) | {"skipped_steps": skipped},
        applied=int(training.state["counter/applied"].item()),
        skipped=skipped,
        param_groups=[
            {key: _number(value) for key, value in group.items()}
            | {"params": names}
            | _resets(optimizer, names)
            for group, names in zip(optimizer.param_groups, training.group_names, strict=True)
        ],
        hold=optimizer.hold.state_dict() if optimizer.hold else None,
        scaler=dataclasses.asdict(optimizer.scaler) if optimizer.scaler else None,
    )
    return _portable(state)


def _portable(state: HostState) -> HostState:
    fields = {item.name: getattr(state, item.name) for item in dataclasses.fields(state)}
    # The fields are copied together, so that objects that two fields share stay shared.
    return HostState(**portable(fields))


def _unfinished_step(training: Training, waiting: tuple[str, ...]) -> dict[str, Any]:
    partial = training.plan.partial and training.plan.stage < 2
    return {
        "summed": list(waiting),
        "unit": training.gradients.path.unit if partial else 1.0,
        "steps": training.batch.accumulation,
        "backward_done": training.current.backward_done,
        "losses": [loss.item() for loss in training.current.losses],
    }


def _resets(optimizer: ZeroOptimizer, names: list[str]) -> dict[str, Any]:
    found = {name: optimizer.reset_at[name] for name in names if name in optimizer.reset_at}
    return {RESET_AT: found} if found else {}


def _number(value: Any) -> Any:
    # A schedule fills an lr tensor in place, perhaps during an asynchronous save.
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Further state dict key of a tied parameter -> its key in `named_parameters`."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the submodules that have a state besides tensors, with their state dict key."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}._extra_state".lstrip("."), part


def take_over_optimizer(training: Training, state: HostState) -> None:
    """Sets the numbers of the param groups, the count of updates and the loss scale."""
    optimizer = training.optimizer
    assert optimizer is not None
    saved_groups = [dict(group) for group in state.param_groups or []]
    optimizer.reset_at.clear()
    for saved in saved_groups:
        optimizer.reset_at.update(saved.pop(RESET_AT, {}))
    _tell_differing_numbers(training, optimizer.param_groups, saved_groups)
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=False):
        take_over_numbers(group, saved)
    if state.applied is not None:
        _set_count(training, "counter/applied", state.applied)
    if optimizer.scaler is not None and state.scaler is not None:
        optimizer.scaler.load(state.scaler)


def _tell_differing_numbers(
    training: Training, groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]
) -> None:
    """Warns once which numbers of the checkpoint replace the engine's, as in DeepSpeed."""
    schedule = training.lr_scheduler
    scheduled = {"params", "lr", "initial_lr"} if schedule is not None else {"params"}
    if getattr(schedule, "cycle_momentum", False):
        scheduled |= {"betas", "momentum"}
    told = [
        f"{key} {then} in place of {now} (param group {index})"
        for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=False))
        for key in sorted(group.keys() & saved.keys() - scheduled)
        if (now := _plain(group[key])) != (then := _plain(saved[key]))
    ]
    line = (
        f"the checkpoint's numbers are used, as in DeepSpeed: {listed(told, most=6)}. To train "
        'with others, set them after load_checkpoint: engine.optimizer.param_groups[0]["lr"] = ...'
    )
    if told and is_new(line):
        logger.warning("%s", line)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else _number(value)


def _set_count(training: Training, name: str, count: int) -> None:
    number = torch.tensor(count, dtype=training.state[name].dtype)
    training.state.write(name, training.mesh.place(number))


def take_over_skips(
    training: Training, state: HostState, *, with_optimizer: bool, with_schedule: bool
) -> None:
    """Sets the count of skipped steps, and the steps that the schedule owes.

    A schedule owes a step for each skipped step for which it was not held back. The debt of a
    loaded schedule is in the hold that was saved with it; a run that always knew (fp16, DeepSpeed)
    saved no debt. A schedule that stays, or is new, keeps its debt.

    Args:
        training: the training to set.
        state: the saved state.
        with_optimizer: whether the optimizer's numbers were loaded.
        with_schedule: whether the schedule was loaded.
    """
    optimizer, skipped = training.optimizer, _skipped(state)
    if optimizer is None:
        training.counters.skipped_steps = skipped or 0
        return
    # The count is always read, which settles the debt of this engine's schedule.
    before = optimizer.skipped_steps
    after = before if skipped is None else skipped
    training.counters.skipped_steps = after
    _set_count(training, "counter/skipped", after)
    training.skips.restart(after, step=training.counters.global_steps)
    hold = optimizer.hold
    if hold is None:
        return
    if not with_schedule:
        hold.owe(hold.owed, skipped=after)
    elif state.hold is None:
        hold.forget()
        hold.owe(0, skipped=after)
    else:
        hold.load_state_dict(state.hold)
        hold.settle(after)
        _fit_to_groups(hold, optimizer, anew=not with_optimizer)


def _fit_to_groups(hold: ScheduleHold, optimizer: ZeroOptimizer, *, anew: bool) -> None:
    """Fits the passed positions to this optimizer's param groups.

    Args:
        hold: the schedule's hold.
        optimizer: the optimizer.
        anew: whether the optimizer's numbers were not loaded.
    """
    groups = optimizer.param_groups
    if any(len(then) != len(groups) for then in hold.positions):
        hold.forget()
    elif anew:
        hold.renumber(lambda then: numbers_at(optimizer._rules, groups, then))


def _skipped(state: HostState) -> int | None:
    """Number of steps skipped before the save, or None if the checkpoint doesn't say."""
    return state.skipped if state.skipped is not None else state.counters.get("skipped_steps")


def take_over_progress(training: Training, state: HostState, *, unfinished: bool) -> None:
    """Sets the counters, and whether the engine is in the middle of a step.

    Args:
        training: the training to set.
        state: the saved state.
        unfinished: whether the gradients of the saved step were loaded too.
    """
    counters = training.counters
    counters.load(state.counters)
    # Older checkpoints have no such count.
    counters.in_step = int(state.counters.get("in_step", training.within_step))
    saved = state.accumulation
    if unfinished and saved is not None:
        losses = [torch.tensor(loss, dtype=torch.float32) for loss in saved["losses"]]
        placed = [training.mesh.place(loss) for loss in losses]
        training.current.resume(placed, backward_done=saved["backward_done"])
    else:
        training.current.restart()
        counters.backwards = counters.in_step = 0
        # The next micro-batch is the first of a step.
        counters.counted_from = counters.micro_steps
