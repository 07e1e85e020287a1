"""What the parts of an engine share: the module, where its state lives, and how far it has come."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from spmdzero.backend import AttentionCall, Forward, Mesh, Region, runtime
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.data._inputs import InputPlacer
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.plan import ShardingPlan
from spmdzero.state._counters import Counters, SkipLog
from spmdzero.step._gradients import GradientStore
from spmdzero.step._loss_health import LossHealth
from spmdzero.step._optimizer import ZeroOptimizer


class Scheduler(Protocol):
    """A schedule that sets the lr of an optimizer's param groups."""

    def step(self) -> Any:
        """Sets the lr of the next step."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Training:
    """One module in training; parts read it, and each field has one part that writes it.

    Attributes:
        module: the user's, its parameters on the devices.
        spmd_config, batch, plan, mesh: what was asked for, and where every tensor lives.
        placer: puts inputs on the devices.
        forward: runs the module, per replica or as a whole.
        gradients: where they wait for the step.
        optimizer: None when the config and the call named none.
        lr_scheduler: stepped at each gradient accumulation boundary.
        health: what is known of losses that are not finite.
        row_counts: keyword inputs that count what is in one replica's rows, to divide a sum by.
        training_dataloader: the loader made from `training_data`.
        batches: endless iterator over it, None before `train_batch` first needs one.
        counters, skips: how far training has come, and which skipped steps the log names.
        losses: of the micro-batches of the step so far, 0-dim on the device.
        ran_forward: whether a forward of the engine with gradients ran since the latest step
            ended: those of all its micro-batches may run before the first backward.
        direct_backward: the user's line of the latest backward pass through what a call of the
            module without its engine returned, whose gradients nobody has taken over; in fp16.
        backward_done: whether this micro-batch has had its backward.
        step_applied: whether the latest `step()` was a boundary that no known overflow skipped.
        in_train_batch: whether `train_batch` is running.
        total: what `train_batch` is going to return, so far.
    """

    module: nn.Module
    spmd_config: SpmdZeroConfig
    batch: BatchSizes
    plan: ShardingPlan
    mesh: Mesh
    placer: InputPlacer
    forward: Region | Forward
    gradients: GradientStore
    optimizer: ZeroOptimizer | None
    lr_scheduler: Scheduler | None
    health: LossHealth
    row_counts: frozenset[str] = frozenset()
    training_dataloader: ZeroDataLoader | None = None
    batches: Iterator[Any] | None = None
    counters: Counters = dataclasses.field(default_factory=Counters)
    skips: SkipLog = dataclasses.field(default_factory=SkipLog)
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ran_forward: bool = False
    direct_backward: str | None = None
    backward_done: bool = False
    step_applied: bool = False
    in_train_batch: bool = False
    total: torch.Tensor | None = None

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
        """The module's parameters by name."""
        # Walking through the module costs milliseconds a step, and the plan knows only these.
        return tuple(self.module.named_parameters())

    @property
    def group_names(self) -> list[list[str]]:
        """The parameters of each param group by name; none without an optimizer."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        groups = self.optimizer.param_groups if self.optimizer else ()
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
        tensors = {f"parameter/{n}": p for n, p in self.module.named_parameters()}
        tensors |= {f"buffer/{n}": b for n, b in self.module.named_buffers()}
        tensors |= {f"accumulator/{n}": a for n, a in self.gradients.accumulators.items()}
        return tensors | (self.optimizer.named_states() if self.optimizer else {})

    def start_unread(self) -> None:
        """Starts what evaluations have left pending; nothing where a step is under way.

        Outputs that nobody has read would be computed with the next forward's, by a larger program
        at each.
        """
        if not self.ran_forward:
            runtime.sync()

    def restart_step(self) -> None:
        """Forgets what was done of a step that will be done again."""
        self.gradients.clear()
        self.backward_done = False
        self.counters.restart_step()
        self.losses = []
