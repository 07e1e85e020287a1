"""DeepSpeedEngine's config getters, by its names and with its return types.

What DeepSpeed keeps in ``engine._config`` is `Engine.spmd_config` here. Sources:
runtime/engine.py and runtime/precision_config.py of DeepSpeed 0.19.8.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._logging import log_once
from spmdzero.compat.getters._report import ReportSettings
from spmdzero.compat.getters._world import WorldSettings
from spmdzero.compat.getters._zero import ZeroSettings
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.plan import ShardingPlan
from spmdzero.precision import dtype_named
from spmdzero.step._optimizer import ZeroOptimizer

# DeepSpeed spells these in lower case, and any other optimizer as the config does.
_LOWER_CASE_NAMES = frozenset({"Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon"})
# runtime/torch_autocast.py, LOWER_PRECISION_SAFE_MODULES.
_AUTOCAST_MODULES = ("linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d")


class ConfigGetters(ZeroSettings, ReportSettings, WorldSettings):
    """What the config says, by DeepSpeed's method names.

    Args:
        batch: the batch sizes of now.
        client_optimizer: the optimizer passed to `initialize`, None for the config's.
    """

    def __init__(
        self,
        *,
        config: SpmdZeroConfig,
        batch: Callable[[], BatchSizes],
        plan: ShardingPlan,
        optimizer: ZeroOptimizer | None,
        client_optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.spmd_config, self._batch, self.plan = config, batch, plan
        self.optimizer, self.client_optimizer = optimizer, client_optimizer

    # -- batches ---------------------------------------------------------------------------

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch size, micro-batch size and gradient accumulation steps.

        As DeepSpeed documents it; 0.19.8 returns three bound methods.
        """
        batch = self._batch()
        return batch.train, batch.micro, batch.accumulation

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; else each `step()` is a boundary."""
        return self.spmd_config.managed_gradient_accumulation

    def dataloader_drop_last(self) -> bool:
        """Whether the loader drops the last incomplete batch."""
        return self.spmd_config.dataloader_drop_last

    # -- optimizer and schedule ------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """The class of the optimizer passed to `initialize`, else the config's name, or None."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        if self.spmd_config.optimizer is None:
            return None
        name = self.spmd_config.optimizer.type
        return name.lower() if name in _LOWER_CASE_NAMES else name

    def optimizer_params(self) -> dict[str, Any] | None:
        """The config's ``optimizer.params``."""
        optimizer = self.spmd_config.optimizer
        return dict(optimizer.params) if optimizer is not None else None

    def get_type(self) -> list[Any]:
        """The entry ``"type"`` of each param group, 0.0 where a group has none."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("type", 0.0) for group in groups]

    def optimizer_legacy_fusion(self) -> bool:
        """False: XLA fuses the update."""
        return False

    def scheduler_name(self) -> str | None:
        """The config's ``scheduler.type``."""
        scheduler = self.spmd_config.scheduler
        return scheduler.type if scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """The config's ``scheduler.params``."""
        scheduler = self.spmd_config.scheduler
        return dict(scheduler.params) if scheduler is not None else None

    # -- gradients -------------------------------------------------------------------------

    def clip_fp32_gradients(self) -> None:
        """Nothing more than `step()` does: it clips to `gradient_clipping()` in every dtype."""
        log_once("clip_fp32_gradients() has no effect of its own: engine.step() clips")

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after the reduction: not `prescale_gradients`."""
        return not self.spmd_config.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before the reduction."""
        return self.spmd_config.gradient_predivide_factor

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of the gradient reduction: the config's, else the parameters'."""
        named = self.spmd_config.communication_data_type
        return dtype_named(named) if named is not None else self.get_data_types()[0]

    # -- precision -------------------------------------------------------------------------

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters and of the gradient accumulator."""
        model = torch.float32
        if self.fp16_enabled():
            model = torch.float16
        elif self.bfloat16_enabled():
            model = torch.bfloat16
        accumulate = self.spmd_config.data_types.grad_accum_dtype
        return model, dtype_named(accumulate) if accumulate is not None else model

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.spmd_config.fp16.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether inputs are cast to fp16."""
        return self.spmd_config.fp16.auto_cast

    def fp16_master_weights_and_gradients(self) -> bool:
        """Whether master weights are fp16."""
        return self.spmd_config.fp16.fp16_master_weights_and_grads

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.spmd_config.bf16.enabled

    def bf16_master_weights_and_gradients(self) -> bool:
        """Whether master weights are bf16."""
        return self.spmd_config.bf16.bf16_master_weights_and_grads

    def bf16_optimizer_states(self) -> bool:
        """Whether optimizer states are bf16."""
        return self.spmd_config.bf16.bf16_optimizer_states

    def loss_scale(self) -> float:
        """The config's ``fp16.loss_scale``: 0 means dynamic. Not the scale that is in use."""
        return self.spmd_config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether ``fp16.loss_scale`` is 0."""
        return self.spmd_config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> int:
        """Where a dynamic loss scale starts: ``2 ** initial_scale_power``."""
        return 2**self.spmd_config.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The numbers of a dynamic loss scale, by the names of DeepSpeed's scaler."""
        fp16 = self.spmd_config.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def torch_autocast_enabled(self) -> bool:
        """Whether forward runs under torch.autocast."""
        return self.spmd_config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The dtype of ``torch_autocast``, None where the config names none."""
        named = self.spmd_config.torch_autocast.dtype
        return dtype_named(named) if named is not None else None

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Classes whose parameters are communicated in the autocast dtype."""
        named = self.spmd_config.torch_autocast.lower_precision_safe_modules
        return named or [f"torch.nn.modules.{name}" for name in _AUTOCAST_MODULES]

    # -- compiling and memory --------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """True: XLA compiles every step, with or without `compile()`."""
        return True

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] = {},  # noqa: B006
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Nothing: XLA compiles every step already."""
        log_once("engine.compile() has no effect of its own: XLA compiles every step")

    def is_deepcompile_enabled(self) -> bool:
        """False: XLA is the compiler."""
        return False

    def is_deepcompile_active(self) -> bool:
        """False: XLA is the compiler."""
        return False

    def collect_python_gc(self) -> int:
        """Collects Python's garbage; returns the number of unreachable objects found."""
        return gc.collect()
