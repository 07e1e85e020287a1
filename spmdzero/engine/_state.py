"""What an engine tells about itself, by DeepSpeed's names."""

import math
from typing import Any, TypeVar

import torch
from torch import nn

from spmdzero.backend.torch_xla import runtime
from spmdzero.compat.getters._settings import EngineSettings
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.engine._counters import Counters
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.engine._skip_log import SkipLog
from spmdzero.plan import ShardingPlan
from spmdzero.step._gradients import GradientStore
from spmdzero.step._loss_health import LossHealth

_Engine = TypeVar("_Engine", bound="EngineState")


class EngineState(EngineSettings):
    """The engine's readable state; `Engine` adds what changes it."""

    module: nn.Module
    plan: ShardingPlan
    spmd_config: SpmdZeroConfig
    optimizer: ZeroOptimizer | None
    _batch: BatchSizes
    _counters: Counters
    _gradients: GradientStore
    _health: LossHealth
    _skip_log: SkipLog
    _losses: list[torch.Tensor]
    _backward_done: bool
    _step_applied: bool

    @property
    def device(self) -> torch.device:
        """Where inputs may live, and parameters do."""
        return runtime.device()

    @property
    def global_steps(self) -> int:
        """Gradient accumulation boundaries passed."""
        return self._counters.global_steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches passed."""
        return self._counters.micro_steps

    @property
    def global_samples(self) -> int:
        """Samples of all devices passed at boundaries."""
        return self._counters.global_samples

    @property
    def micro_losses(self) -> tuple[torch.Tensor, ...]:
        """The losses of the step's micro-batches so far, 0-dim on the device."""
        return tuple(self._losses)

    @property
    def skipped_steps(self) -> int:
        """Steps that a non-finite gradient kept from the weights; reads one scalar but in fp16."""
        optimizer = self.optimizer
        if optimizer is None or optimizer.loss_scaler is not None or not optimizer.can_skip:
            return self._counters.skipped_steps
        skipped = optimizer.skipped_steps
        self._skip_log.tell(skipped, step=self.global_steps)
        return skipped

    @property
    def config(self) -> dict[str, Any]:
        """The config as the user wrote it."""
        return self.spmd_config.source

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` was a boundary whose update was not skipped."""
        if not self._step_applied or self.optimizer is None or self.optimizer.loss_scaler:
            return self._step_applied
        return not self.optimizer.overflow

    def get_lr(self) -> list[float]:
        """The lr of each param group, for the next step.

        With a schedule this reads one scalar, but in fp16: skipped steps hold the schedule back.
        """
        return [float(group["lr"]) for group in self._groups_now()]

    def get_mom(self) -> list[Any]:
        """The betas of each param group, or its momentum (SGD, RMSprop); 0.0 where it has none.

        Muon's half of the parameters has 0.0 too, as in DeepSpeed.
        """
        groups = self._groups_now()
        momenta = (g.get("momentum", 0.0) if "use_muon" not in g else 0.0 for g in groups)
        return [group.get("betas", mom) for group, mom in zip(groups, momenta, strict=True)]

    def _groups_now(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            return []
        groups = self.optimizer.param_groups
        if self.optimizer.hold is None:
            return groups
        self.optimizer.hold.settle(self.skipped_steps)
        return self.optimizer.hold.groups_now(groups)

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by before backward; 1.0 but for fp16."""
        return self.optimizer.loss_scale if self.optimizer else 1.0

    def get_global_grad_norm(self) -> float | None:
        """The L2 norm of all gradients of the latest step, unscaled and before clipping.

        Reads one scalar and so waits for the step; None before the first.
        """
        if self.optimizer is None or self.optimizer.grad_norm is None:
            return None
        norm = self.optimizer.grad_norm.item()
        # A loss that is not finite has such a gradient; its record costs a read of its own.
        if not math.isfinite(norm):
            self._health.log_if_bad()
        return norm

    def train_batch_size(self) -> int:
        """Samples of all devices in one step."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows that each device works on in one micro-batch."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in one step."""
        return self._batch.accumulation

    def gradient_clipping(self) -> float:
        """The largest global gradient norm, 0 for none."""
        return self.spmd_config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """0, 1 or 2."""
        return self.plan.stage

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients summed so far."""
        self._gradients.forget(self.module.parameters())

    def train(self: _Engine, mode: bool = True) -> _Engine:
        """Puts the module into training (or evaluation) mode."""
        self.training = mode
        self.module.train(mode)
        return self

    def eval(self: _Engine) -> _Engine:
        """Puts the module into evaluation mode."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" in self._modules and hasattr(self._modules["module"], name):
                return getattr(self._modules["module"], name)
            raise
