"""A saved state into a running training: checked as a whole, then taken over tensor by tensor."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from spmdzero.backend import arrays, runtime
from spmdzero.data._seeds import set_generators
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import Box, HostState, TrainingState
from spmdzero.state._host_state import (
    extra_states,
    take_over_optimizer,
    take_over_progress,
    take_over_skips,
)
from spmdzero.state._live_state import persistent_buffers
from spmdzero.state._tensor_matching import LoadReport, Target, match, needed_parts
from spmdzero.state._training import Training

_TOGETHER = 1 << 30
"""Bytes of copies to replicated tensors that one program makes; it needs as many again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What of a saved state is taken over.

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

    def loads_schedule(self, training: Training) -> bool:
        """Whether the schedule is taken over."""
        can = hasattr(training.lr_scheduler, "load_state_dict")
        return can and self.scheduler and not self.module_only


@torch.no_grad()
def restore(training: Training, state: TrainingState, options: LoadOptions) -> LoadReport:
    """Takes over `state`, each device reading only the parts that it holds.

    Returns which of the model's names the state lacks, and which it has besides.

    Raises:
        SpmdZeroCheckpointError: the state is damaged, or does not fit; nothing has changed.
    """
    host, optimizer = state.host, training.optimizer
    with_optimizer = options.optimizer and not options.module_only and optimizer is not None
    if optimizer is not None:
        optimizer.renew()
    own_loading = options.custom_load_fn is not None
    # Where a tensor's parts are is known once it is there.
    _settle()
    targets, report = match(
        training,
        state,
        strict=options.strict,
        module=not own_loading,
        optimizer=with_optimizer,
    )
    if own_loading:
        state.checked()
    else:
        state.check(needed_parts(targets))
    if not options.module_only:
        training.gradients.clear()
    with _progress(training, host, options), _own_loading(training, state, options):
        _take_over_tensors(training, targets)
    if with_optimizer:
        take_over_optimizer(training, host)
    elif optimizer is not None:
        optimizer.refresh_masters()
        runtime.sync()
    for key, part in extra_states(training.module):
        if key in host.extra:
            part.set_extra_state(host.extra[key])
    if training.region is not None:
        training.state.flags.clear()
    if with_optimizer and host.accumulation is not None:
        training.gradients.adopt(host.accumulation["summed"])
    if not options.module_only:
        take_over_progress(training, host, unfinished=with_optimizer)
        loads_schedule = options.loads_schedule(training)
        take_over_skips(training, host, with_optimizer=with_optimizer, with_schedule=loads_schedule)
    runtime.sync()
    if not options.module_only:
        # They come last: nothing may draw from them any more, and torch_xla's own goes on with each
        # program that is started.
        set_generators(host.rng or {})
    return report


def _settle() -> None:
    runtime.sync()
    runtime.wait()


def _take_over_tensors(training: Training, targets: list[Target]) -> None:
    _settle()
    pending = 0
    for target in targets:
        pending += _overwrite(training, target)
        if pending > _TOGETHER:
            runtime.sync()
            pending = 0
    runtime.sync()


def _overwrite(training: Training, target: Target) -> int:
    """Gives a tensor its new value; the host holds no more than its devices' parts.

    Returns the bytes that are left to the pending program.
    """
    parts: dict[tuple[Box, ...], torch.Tensor] = {}
    for boxes in target.boxes:
        if boxes not in parts:
            parts[boxes] = _part(target, boxes)
    stored = target.held.stored
    training.mesh.overwrite(stored, [parts[boxes] for boxes in target.boxes])
    return 0 if arrays.is_split(stored) else stored.nbytes


def _part(target: Target, boxes: tuple[Box, ...]) -> torch.Tensor:
    """What one device holds, in the form in which it holds it."""
    held, dtype = target.held, target.held.stored.dtype
    if held.layout is None or held.layout.kind != "flat":
        (box,) = boxes
        return target.read(box).to(dtype)
    (length,) = arrays.local_shapes(held.stored)[0]
    found = [target.read(box).reshape(-1).to(dtype) for box in boxes]
    flat = torch.cat(found) if found else torch.zeros(0, dtype=dtype)
    return F.pad(flat, (0, length - math.prod(flat.shape)))


@contextlib.contextmanager
def _progress(training: Training, host: HostState, options: LoadOptions) -> Iterator[None]:
    """The schedule and the loader as saved; as they were when the body fails."""
    schedule: Any = training.lr_scheduler
    loader = training.training_dataloader
    position = before = None
    if loader is not None and host.loader is not None and not options.module_only:
        position = loader.adapted(host.loader)
    try:
        if options.loads_schedule(training):
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
    if loader is not None and not options.module_only:
        loader.end_stream()
    if loader is not None and position is not None:
        loader.load_state_dict(position)


@contextlib.contextmanager
def _own_loading(training: Training, state: TrainingState, options: LoadOptions) -> Iterator[None]:
    """The caller's own loading of the module; undone when it or the body fails."""
    if options.custom_load_fn is None:
        yield
        return
    named = training.named_tensors()
    before = {
        name: named[name].detach().cpu()
        for name in named
        if name.startswith(("parameter/", "buffer/"))
    }
    try:
        options.custom_load_fn(src=_module_tensors(training, state), dst=training.module)
        if training.optimizer is not None:
            training.optimizer.refresh_masters()
        runtime.sync()
        yield
    except BaseException:
        for name, value in before.items():
            training.mesh.mark(named[name].copy_(value), training.plan.at_rest(name).spec)
        runtime.sync()
        raise


def _module_tensors(training: Training, state: TrainingState) -> dict[str, torch.Tensor]:
    """The saved state dict of the module, whole on the CPU, tied weights under all their names."""
    first = {tensor: name for name, tensor in training.module.named_parameters()}
    first |= {tensor: name for name, tensor in persistent_buffers(training.module)}
    loaded = {
        name.split("/", 1)[1]: tensor.whole()
        for name, tensor in state.tensors.items()
        if name.startswith(("parameter/", "buffer/"))
    }
    for name, tensor in training.module.named_parameters(remove_duplicate=False):
        if first[tensor] in loaded:
            loaded.setdefault(name, loaded[first[tensor]])
    return loaded
