"""The data that the parts of an engine share: the module, its state, and its progress."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from spmdzero.backend import AttentionCall, Forward, Mesh, Region, runtime
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.data._inputs import InputPlacer
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.plan import ShardingPlan
from spmdzero.state._counters import Counters, CurrentStep, SkipLog
from spmdzero.step._gradients import GradientStore
from spmdzero.step._loss_health import LossHealth
from spmdzero.step._optimizer import ZeroOptimizer
from spmdzero.step._state import State


class Scheduler(Protocol):
    """A schedule that sets the lr of an optimizer's param groups."""

    def step(self) -> Any:
        """Sets the lr of the next step."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Training:
    """One module in training; all parts read it, and only one part writes each field.

    Attributes:
        state: every tensor that outlives a micro-batch.
        spmd_config, batch: the config and the batch sizes.
        placer: puts inputs on the devices.
        forward: runs the module, per replica or as a whole.
        gradients: keeps gradients until the step.
        optimizer: the optimizer, None if neither the config nor the call named one.
        lr_scheduler: the schedule, stepped at each gradient accumulation boundary.
        health: the record of non-finite losses.
        row_counts: names of keyword inputs that count the items of one replica's rows, as divisors.
        training_dataloader: the loader made from `training_data`.
        counters, skips: the progress of training, and the log of skipped steps.
        current: the progress of the current step.
        in_train_batch: whether `train_batch` is running.
        on_first_inputs: called once with the first inputs that are trained on, before they are
            placed; None where nothing waits for them.
        module, mesh: the module and the mesh of the state.
    """

    state: State
    spmd_config: SpmdZeroConfig
    batch: BatchSizes
    placer: InputPlacer
    forward: Region | Forward
    gradients: GradientStore
    optimizer: ZeroOptimizer | None
    lr_scheduler: Scheduler | None
    health: LossHealth
    row_counts: frozenset[str] = frozenset()
    training_dataloader: ZeroDataLoader | None = None
    counters: Counters = dataclasses.field(default_factory=Counters)
    skips: SkipLog = dataclasses.field(default_factory=SkipLog)
    current: CurrentStep = dataclasses.field(default_factory=CurrentStep)
    in_train_batch: bool = False
    on_first_inputs: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
    module: nn.Module = dataclasses.field(init=False)
    mesh: Mesh = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.module, self.mesh = self.state.module, self.state.mesh

    @property
    def plan(self) -> ShardingPlan:
        """The plan of where every tensor lives."""
        return self.state.plan

    @property
    def device(self) -> torch.device:
        """The device of parameters, on which inputs may be too."""
        return runtime.device()

    @functools.cached_property
    def region(self) -> Region | None:
        """The replica region of the forward, None with a global forward."""
        return self.forward if isinstance(self.forward, Region) else None

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        """How the latest forward computes attention; empty if its program has no kernels."""
        return self.forward.attention

    @property
    def group_names(self) -> list[list[str]]:
        """Names of the parameters of each param group; empty without an optimizer."""
        names, groups = self.state.names, self.optimizer.param_groups if self.optimizer else ()
        return [[names[parameter] for parameter in group["params"]] for group in groups]

    @property
    def within_step(self) -> int:
        """Number of micro-batches passed in the current step, if the engine counts them, else 0."""
        if not self.spmd_config.managed_gradient_accumulation:
            return 0
        return (self.counters.micro_steps - self.counters.counted_from) % self.batch.accumulation

    @property
    def skipped_steps(self) -> int:
        """Number of steps that a non-finite gradient skipped; reads one scalar except in fp16."""
        optimizer = self.optimizer
        if optimizer is None or self.knows_skips:
            return self.counters.skipped_steps
        skipped = optimizer.skipped_steps
        self.skips.tell(skipped, step=self.counters.global_steps)
        return skipped

    @property
    def knows_skips(self) -> bool:
        """Whether the host knows without a read which steps were skipped."""
        optimizer = self.optimizer
        return optimizer is None or optimizer.scaler is not None or not optimizer.can_skip

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor under ``<role>/<name>``: parameters, buffers, accumulators, states."""
        return {
            place.name: place.tensor
            for place in self.state.places()
            if place.tensor is not None and not place.replaced and "/" in place.name
        }

    def start_unread(self) -> None:
        """Starts the pending programs of evaluations; does nothing while a step is under way.

        Unread outputs would be computed together with the next forward's, by an ever larger
        program.
        """
        if not self.current.ran_forward:
            runtime.sync()

    def restart_step(self) -> None:
        """Forgets the progress of a step that will be repeated."""
        self.gradients.clear()
        self.current.restart()
        self.counters.restart_step()
