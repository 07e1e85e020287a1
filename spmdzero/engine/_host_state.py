"""What of an engine's state is no tensor on the devices: taken down, and taken over."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spmdzero.engine._counters import Counters
from spmdzero.engine._generators import generators
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.store import HostState

if TYPE_CHECKING:
    from spmdzero.engine._engine import Engine

logger = logging.getLogger("spmdzero")


def host_state(
    engine: "Engine", *, exclude_frozen: bool, client_state: Mapping[str, Any]
) -> HostState:
    """The engine's state on the host; reads two scalars, and the losses of an unfinished step.

    Raises:
        SpmdZeroUsageError: gradients wait where they can't be saved.
    """
    optimizer, waiting = engine.optimizer, engine._gradients.summed()
    schedule: Any = engine.lr_scheduler
    loader = engine.training_dataloader
    frozen = [n for n, p in engine.module.named_parameters() if not p.requires_grad]
    state = HostState(
        counters=dataclasses.asdict(engine._counters),
        accumulation=_accumulation(engine, waiting) if waiting else None,
        scheduler=dict(schedule.state_dict()) if hasattr(schedule, "state_dict") else None,
        loader=loader.state_dict() if loader is not None else None,
        rng=generators(),
        extra={key: part.get_extra_state() for key, part in extra_states(engine.module)},
        excluded=tuple(frozen) if exclude_frozen else (),
        client_state=dict(client_state),
        tied=tied_names(engine.module),
    )
    if optimizer is None:
        return state
    counts = optimizer.named_states()
    skipped = int(counts["counter/skipped"].item())
    engine._skip_log.tell(skipped, step=engine.global_steps)
    return dataclasses.replace(
        state,
        applied=int(counts["counter/applied"].item()),
        skipped=skipped,
        param_groups=group_numbers(engine, optimizer),
        hold=optimizer.hold.state_dict() if optimizer.hold else None,
        scaler=dataclasses.asdict(optimizer.loss_scaler) if optimizer.loss_scaler else None,
    )


def _accumulation(engine: "Engine", waiting: tuple[str, ...]) -> dict[str, Any]:
    return {
        "summed": list(waiting),
        "unit": engine._gradients.unit if _is_partial(engine) else 1.0,
        "steps": engine.gradient_accumulation_steps(),
        "backward_done": engine._backward_done,
        "losses": [loss.item() for loss in engine.micro_losses],
    }


def _is_partial(engine: "Engine") -> bool:
    return engine.plan.partial and engine.plan.stage < 2


def group_numbers(engine: "Engine", optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """The param groups, their parameters by name."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    return [
        {key: _number(value) for key, value in group.items() if key != "params"}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    # A schedule fills a lr that is a tensor in place, perhaps while this is written.
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further state dict key of a tied parameter -> the one that `named_parameters` gives it."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a module that have a state besides tensors, by their state dict key."""
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}._extra_state".lstrip("."), part


def take_over_optimizer(engine: "Engine", optimizer: ZeroOptimizer, state: HostState) -> None:
    """Sets the numbers of the param groups, the counts of updates and the loss scale."""
    for group, saved in zip(optimizer.param_groups, state.param_groups or [], strict=False):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor) and key != "params":
                # It stays the tensor that somebody else holds.
                group[key].fill_(value)
            elif key != "params":
                group[key] = value
    counts = {"counter/applied": state.applied, "counter/skipped": state.skipped}
    for name, count in counts.items():
        if count is not None:
            held = optimizer.named_states()[name]
            held.copy_(engine.mesh.place(torch.tensor(count, dtype=held.dtype)))
            engine.mesh.mark(held)
    engine._skip_log.restart(state.skipped or 0, step=int(state.counters.get("global_steps", 0)))
    if optimizer.loss_scaler is not None and state.scaler is not None:
        known = {item.name for item in dataclasses.fields(optimizer.loss_scaler)}
        for key, value in state.scaler.items():
            if key in known:
                setattr(optimizer.loss_scaler, key, value)
    if optimizer.hold is not None and state.hold is not None:
        optimizer.hold.load_state_dict(state.hold)


def take_over_progress(engine: "Engine", state: HostState, *, unfinished: bool) -> None:
    """Sets the counters, and whether the engine stands in the middle of a step.

    Args:
        engine: whose.
        state: the saved one.
        unfinished: whether the gradients of the saved step were taken over too.
    """
    names = {item.name for item in dataclasses.fields(Counters)}
    counters = {key: int(value) for key, value in state.counters.items() if key in names}
    engine._counters = Counters(**counters)
    engine._backward_done, engine._losses = False, []
    saved = state.accumulation
    if unfinished and saved is not None:
        engine._backward_done = saved["backward_done"]
        losses = [torch.tensor(loss, dtype=torch.float32) for loss in saved["losses"]]
        engine._losses = [engine.mesh.place(loss) for loss in losses]
    else:
        engine._counters.backwards = 0
        # The next micro-batch is the first of a step.
        engine._counters.counted_from = engine.micro_steps
