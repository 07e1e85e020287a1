"""Loads a saved state into a running training: checks it as a whole, then copies its tensors."""

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
from spmdzero.formats import Box, HostState, TrainingState, in_eight_bits
from spmdzero.state._host_state import (
    extra_states,
    take_over_optimizer,
    take_over_progress,
    take_over_skips,
)
from spmdzero.state._tensor_matching import LoadReport, Target, match, needed_parts
from spmdzero.state._training import Training

_TOGETHER = 1 << 30
"""Bytes that one program copies to replicated tensors; it needs the same memory once more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The parts of a saved state to load.

    Attributes:
        strict: whether names of parameters and buffers must be those of the model.
        optimizer: whether to load masters, optimizer states, param groups and loss scale; if not,
            the masters are made from the loaded parameters, as in DeepSpeed.
        scheduler: whether to load the learning-rate schedule.
        module_only: whether to load only parameters and buffers.
        custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` instead of loading
            parameters and buffers.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., None] | None = None

    def loads_schedule(self, training: Training) -> bool:
        """Whether the schedule is loaded."""
        can = hasattr(training.lr_scheduler, "load_state_dict")
        return can and self.scheduler and not self.module_only


@torch.no_grad()
def restore(training: Training, state: TrainingState, options: LoadOptions) -> LoadReport:
    """Loads `state`; each device reads only the parts that it holds.

    Returns the names of the model that the state lacks, and the state's further names.

    Raises:
        SpmdZeroCheckpointError: the state is damaged, or does not fit; nothing has changed.
    """
    state = in_eight_bits(state, training.plan.in_eight_bits)
    host, optimizer = state.host, training.optimizer
    with_optimizer = options.optimizer and not options.module_only and optimizer is not None
    if optimizer is not None:
        optimizer.renew()
    own_loading = options.custom_load_fn is not None
    # The places of a tensor's parts are known only after it is computed.
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
        # Generators come last: no code may draw from them afterwards, and torch_xla's generator
        # advances with each started program.
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
    """Gives a tensor its new value; the host holds only the parts of its own devices.

    Returns the number of bytes that the pending program copies.
    """
    parts: dict[tuple[Box, ...], torch.Tensor] = {}
    for boxes in target.boxes:
        if boxes not in parts:
            parts[boxes] = _part(target, boxes)
    stored = target.held.stored
    training.mesh.overwrite(stored, [parts[boxes] for boxes in target.boxes])
    return 0 if arrays.is_split(stored) else stored.nbytes


def _part(target: Target, boxes: tuple[Box, ...]) -> torch.Tensor:
    """The part of one device, in its stored form."""
    held, dtype = target.held, target.held.stored.dtype
    if held.layout is None or held.layout.kind != "flat":
        (box,) = boxes
        return target.read(box).to(dtype)
    (length,) = arrays.local_shapes(held.stored)[0]
    found = [target.read(box).reshape(-1).to(dtype) for box in boxes]
    flat = torch.cat(found) if found else torch.zeros(0, dtype=dtype)
    return F.pad(flat, (0, length - math.prod(flat.shape)), value=held.padding)


@contextlib.contextmanager
def _progress(training: Training, host: HostState, options: LoadOptions) -> Iterator[None]:
    """Loads the schedule and the loader; restores the schedule if the body fails."""
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
    """Runs the caller's own loading of the module, and undoes it if it or the body fails."""
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
            training.mesh.lay(named[name].copy_(value), training.plan.at_rest(name))
        runtime.sync()
        raise


def _module_tensors(training: Training, state: TrainingState) -> dict[str, torch.Tensor]:
    """The module's saved state dict, whole on the CPU, with tied weights under all their names."""
    first = {tensor: name for name, tensor in training.module.named_parameters()}
    loaded = {
        name.split("/", 1)[1]: tensor.whole()
        for name, tensor in state.tensors.items()
        if name.startswith(("parameter/", "buffer/"))
    }
    for name, tensor in training.module.named_parameters(remove_duplicate=False):
        if first[tensor] in loaded:
            loaded.setdefault(name, loaded[first[tensor]])
    return loaded
