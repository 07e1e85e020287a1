"""A saved state into a running engine: checked as a whole, then taken over tensor by tensor."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from spmdzero.backend.torch_xla import runtime
from spmdzero.data._generators import set_generators
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import HostState, TrainingState
from spmdzero.state._host_state import (
    extra_states,
    take_over_optimizer,
    take_over_progress,
    take_over_skips,
)
from spmdzero.state._live import persistent_buffers
from spmdzero.state._match import LoadReport, Target, match, needed_parts
from spmdzero.state._overwrite import overwrite

if TYPE_CHECKING:
    from spmdzero.engine._engine import Engine

_TOGETHER = 1 << 30
"""Bytes of copies to replicated tensors that one program makes; it needs as many again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What of a saved state an engine takes over.

    Attributes:
        strict: names of parameters and buffers must be those of the model.
        optimizer: masters, optimizer states, param groups, loss scale; else the masters are made
            of the loaded parameters, as DeepSpeed does.
        scheduler: the learning-rate schedule.
        module_only: nothing but parameters and buffers.
        custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` in place of
            loading parameters and buffers.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., None] | None = None


@torch.no_grad()
def restore(engine: "Engine", state: TrainingState, options: LoadOptions) -> LoadReport:
    """Takes over `state`, each device reading only the parts that it holds.

    Returns which of the model's names the state lacks, and which it has besides.

    Raises:
        SpmdZeroCheckpointError: the state is damaged, or does not fit; the engine is as it was.
    """
    with_optimizer = options.optimizer and not options.module_only and engine.optimizer is not None
    # Where a tensor's parts are is known once it is there.
    runtime.sync()
    runtime.wait()
    targets, report = match(
        engine,
        state,
        strict=options.strict,
        module=options.custom_load_fn is None,
        optimizer=with_optimizer,
    )
    if options.custom_load_fn is None:
        state.check(needed_parts(targets))
    else:
        state.checked()
    with _progress(engine, state.host, options), _own_loading(engine, state, options):
        _take_over_tensors(engine, targets)
    if not with_optimizer and engine.optimizer is not None:
        engine.optimizer.refresh_masters()
        runtime.sync()
    elif engine.optimizer is not None:
        take_over_optimizer(engine, engine.optimizer, state.host)
    extra = state.host.extra
    for key, part in extra_states(engine.module):
        if key in extra:
            part.set_extra_state(extra[key])
    if engine._region is not None:
        engine._region.disagreements.clear()
    saved = state.host.accumulation
    if with_optimizer and saved is not None:
        engine._gradients.adopt(saved["summed"])
    if not options.module_only:
        take_over_progress(engine, state.host, unfinished=with_optimizer)
        take_over_skips(
            engine,
            state.host,
            with_optimizer=with_optimizer,
            with_schedule=_loads_schedule(engine, options),
        )
        # Last: nothing above may draw from them any more.
        set_generators(state.host.rng or {})
    runtime.sync()
    return report


def _take_over_tensors(engine: "Engine", targets: list[Target]) -> None:
    engine._gradients.clear()
    runtime.sync()
    runtime.wait()
    pending = 0
    for target in targets:
        pending += overwrite(engine, target)
        if pending > _TOGETHER:
            runtime.sync()
            pending = 0
    runtime.sync()


def _loads_schedule(engine: "Engine", options: LoadOptions) -> bool:
    can = hasattr(engine.lr_scheduler, "load_state_dict")
    return can and options.scheduler and not options.module_only


@contextlib.contextmanager
def _progress(engine: "Engine", host: HostState, options: LoadOptions) -> Iterator[None]:
    """The schedule and the loader as saved; as they were when the body fails."""
    schedule: Any = engine.lr_scheduler
    loader = engine.training_dataloader
    position = before = None
    if loader is not None and host.loader is not None and not options.module_only:
        position = loader.adapted(host.loader)
    try:
        if _loads_schedule(engine, options):
            if host.scheduler is None:
                raise SpmdZeroCheckpointError(
                    file="the checkpoint",
                    reason="holds no state of a learning-rate schedule",
                    fix="Load it with load_lr_scheduler_states=False",
                )
            before = copy.deepcopy(schedule.state_dict())
            schedule.load_state_dict(copy.deepcopy(dict(host.scheduler)))
        yield
    except BaseException:
        if before is not None:
            schedule.load_state_dict(before)
        raise
    if not options.module_only:
        engine._own_data = None
    if loader is not None and position is not None:
        loader.load_state_dict(position)


@contextlib.contextmanager
def _own_loading(engine: "Engine", state: TrainingState, options: LoadOptions) -> Iterator[None]:
    """The caller's own loading of the module; undone when it or the body fails."""
    if options.custom_load_fn is None:
        yield
        return
    named = dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
    before = {name: tensor.detach().cpu() for name, tensor in named.items()}
    try:
        options.custom_load_fn(src=module_tensors(engine, state), dst=engine.module)
        if engine.optimizer is not None:
            engine.optimizer.refresh_masters()
        runtime.sync()
        yield
    except BaseException:
        for name, tensor in named.items():
            engine.mesh.mark(tensor.copy_(before[name]))
        runtime.sync()
        raise


def module_tensors(engine: "Engine", state: TrainingState) -> dict[str, torch.Tensor]:
    """The saved state dict of the module, whole on the CPU, tied weights under all their names."""
    first = {tensor: name for name, tensor in engine.module.named_parameters()}
    first |= {tensor: name for name, tensor in persistent_buffers(engine.module)}
    saved = {
        name.split("/", 1)[1]: tensor
        for name, tensor in state.tensors.items()
        if name.startswith(("parameter/", "buffer/"))
    }
    loaded = {name: tensor.whole() for name, tensor in saved.items()}
    for name, tensor in engine.module.named_parameters(remove_duplicate=False):
        if first[tensor] in loaded:
            loaded.setdefault(name, loaded[first[tensor]])
    return loaded
