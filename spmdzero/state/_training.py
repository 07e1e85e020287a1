"""What the parts of an engine share: the module, where its state lives, and how far it has come."""

import dataclasses
import functools
from typing import Any, Protocol

import torch
from torch import nn

from spmdzero.backend import AttentionCall, Forward, Mesh, Region, runtime
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.data._inputs import InputPlacer
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.plan import ShardingPlan
from spmdzero.state._counters import Counters, SkipLog
from spmdzero.state._current_step import CurrentStep
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
    """One module in training; parts read it, and each field has one part that writes it.

    Attributes:
        state: every tensor that outlives a micro-batch.
        spmd_config, batch: what was asked for.
        placer: puts inputs on the devices.
        forward: runs the module, per replica or as a whole.
        gradients: where they wait for the step.
        optimizer: None when the config and the call named none.
        lr_scheduler: stepped at each gradient accumulation boundary.
        health: what is known of losses that are not finite.
        row_counts: keyword inputs that count what is in one replica's rows, to divide a sum by.
        training_dataloader: the loader made from `training_data`.
        counters, skips: how far training has come, and which skipped steps the log names.
        current: how far the step that is under way has come.
        in_train_batch: whether `train_batch` is running.
        module, mesh: those of the state.
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
    module: nn.Module = dataclasses.field(init=False)
    mesh: Mesh = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.module, self.mesh = self.state.module, self.state.mesh

    @property
    def plan(self) -> ShardingPlan:
        """Where every tensor lives."""
        return self.state.plan

    @property
    def device(self) -> torch.device:
        """Where inputs may live, and parameters do."""
        return runtime.device()

    @functools.cached_property
    def region(self) -> Region | None:
        """Where the forward runs, None with a global forward."""
        return self.forward if isinstance(self.forward, Region) else None

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        """How the latest forward computes attention; empty where its program has no kernels."""
        return self.forward.attention

    @functools.cached_property
    def parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """The module's parameters by name, as they were planned."""
        return tuple(self.state.parameters.items())

    @property
    def group_names(self) -> list[list[str]]:
        """The parameters of each param group by name; none without an optimizer."""
        names, groups = self.state.names, self.optimizer.param_groups if self.optimizer else ()
        return [[names[parameter] for parameter in group["params"]] for group in groups]

    @property
    def within_step(self) -> int:
        """Micro-batches passed of the current step, as far as the engine counts them."""
        if not self.spmd_config.managed_gradient_accumulation:
            return 0
        return (self.counters.micro_steps - self.counters.counted_from) % self.batch.accumulation

    @property
    def skipped_steps(self) -> int:
        """Steps that a non-finite gradient kept from the weights; reads one scalar but in fp16."""
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
        """Starts what evaluations have left pending; nothing where a step is under way.

        Outputs that nobody has read would be computed with the next forward's, by a larger program
        at each.
        """
        if not self.current.ran_forward:
            runtime.sync()

    def restart_step(self) -> None:
        """Forgets what was done of a step that will be done again."""
        self.gradients.clear()
        self.current.restart()
        self.counters.restart_step()
