"""DeepSpeedEngine's getters, with its names and return types.

DeepSpeed's ``engine._config`` is `Engine.spmd_config` here; ``_config`` has the same values under
DeepSpeed's names. Sources: runtime/engine.py and runtime/precision_config.py of DeepSpeed 0.19.8. A
value that has no effect under SPMD, such as a bucket size, is returned as the config holds it.
"""

import functools
import gc
import operator
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._logging import log_once
from spmdzero.backend import runtime
from spmdzero.backend.hosts._row_sharers import row_sharers
from spmdzero.compat import comm
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.plan import ShardingPlan
from spmdzero.precision import dtype_named
from spmdzero.step._optimizer import ZeroOptimizer

_NO_TIMER = (
    "engine.tput_timer times nothing here: a step is one compiled program. "
    '"wall_clock_breakdown": true times each step'
)


class ThroughputTimer:
    """DeepSpeed's timer of samples per second, which here only counts epochs.

    Args:
        batch_size: returns the present train batch size.

    Attributes:
        epoch_count: number of calls of `update_epoch_count`.
    """

    def __init__(self, batch_size: Callable[[], int]) -> None:
        self._batch_size = batch_size
        self.epoch_count = 0

    @property
    def batch_size(self) -> int:
        """Number of samples of a step."""
        return self._batch_size()

    def update_epoch_count(self) -> None:
        """Counts an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """Does nothing, and logs that once."""
        log_once(_NO_TIMER)

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Does nothing, and logs that once."""
        log_once(_NO_TIMER)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("steps_per_output", "monitor_memory"):
            log_once(_NO_TIMER)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"engine.tput_timer.{name}: {_NO_TIMER}")


# Getters of one key each: prefix of the key's path, prefix of the getter's name, and the common
# rest of both, or the name's rest = the path's rest.
KEYS = (
    (
        "",
        "",
        """steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level
        managed_gradient_accumulation dataloader_drop_last gradient_predivide_factor
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
    ),
    ("bf16.", "bfloat16_", "enabled"),
    (
        "bf16.bf16_",
        "bf16_",
        "optimizer_states master_weights_and_gradients=master_weights_and_grads",
    ),
    ("checkpoint.", "", "use_node_local_storage load_universal_checkpoint=load_universal"),
    ("compile.", "is_", "deepcompile_enabled=deepcompile"),
    ("tensor_parallel.", "", "autotp_size"),
    (
        "flops_profiler.",
        "flops_profiler_",
        """enabled recompute_fwd_factor profile_step module_depth top_modules detailed
        output_file""",
    ),
    (
        "fp16.",
        "fp16_",
        "enabled auto_cast master_weights_and_gradients=fp16_master_weights_and_grads",
    ),
    ("fp16.", "", "loss_scale"),
    ("torch_autocast.", "torch_autocast_", "enabled"),
    (
        "zero_optimization.",
        "zero_",
        """offload_optimizer offload_param reduce_scatter contiguous_gradients
        allgather_partitions round_robin_gradients
        multi_rank_bucket_allreduce=use_multi_rank_bucket_allreduce reduce_bucket_size
        allgather_bucket_size sub_group_size log_trace_cache_warnings""",
    ),
    (
        "zero_optimization.zero_",
        "zero_",
        "hpz_partition_size quantized_weights quantized_gradients",
    ),
    (
        "zero_optimization.stage3_",
        "zero_",
        """prefetch_bucket_size param_persistence_threshold model_persistence_threshold
        max_live_parameters max_reuse_distance module_granularity_threshold
        allgather_sequential""",
    ),
)
_ONE_PARALLELISM = "one process drives all devices, whatever axes their mesh has"
# Getters with a fixed value: the value, the reason, and the names.
FIXED: tuple[tuple[Any, str, str], ...] = (
    (False, "autotuning is refused", "autotuning_enabled"),
    (False, "curriculum learning is refused", "curriculum_learning_enabled"),
    (False, "data efficiency is refused", "data_efficiency_enabled data_sampling_enabled"),
    (False, "random layer token drop is refused", "random_ltd_enabled"),
    (False, "XLA fuses the update", "optimizer_legacy_fusion"),
    (False, "XLA is the compiler", "is_deepcompile_active"),
    (
        False,
        "a gathered parameter is let go, and no group is told apart as the first",
        """is_first_weights_partition_group
        zero_save_muon_momentum_buffer_in_memory""",
    ),
    (False, "the collective ledger shows what was compiled", "is_sanity_checks_enabled"),
    (False, "nothing is kept on a disk", "zero_nvme_offload_optimizer"),
    (False, "the devices update, and no processor of the host does", "super_offload"),
    (
        False,
        "that is ZeRO++",
        "zero_quantized_nontrainable_weights",
    ),
    (False, "DeepSpeed removed it", "zero_legacy_stage1"),
    (False, "a checkpoint format that DeepSpeed no longer writes", "zero_elastic_checkpoint"),
    (False, "shards follow the plan, not a flat buffer", "zero_parameter_alignment"),
    (True, "the norm is part of every step's program", "zero_compute_grad_norm"),
    (True, "a missing gradient counts as one that is zero", "zero_ignore_unused_parameters"),
    (True, "not the parameters rounded from masters are trained on", "zero_load_from_fp32_weights"),
    (0, _ONE_PARALLELISM, "get_model_parallel_rank"),
    (0, _ONE_PARALLELISM, "get_tensor_parallel_rank"),
)


# DeepSpeed spells these in lower case, and any other optimizer as the config does.
_LOWER_CASE_NAMES = frozenset({"Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon"})
# runtime/torch_autocast.py, LOWER_PRECISION_SAFE_MODULES.
_AUTOCAST_MODULES = ("linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d")


class ConfigGetters:
    """Getters of the config's values and of processes, under DeepSpeed's method names.

    One process drives all devices of its host. DeepSpeed's ranks are therefore two things here:
    processes (`world_size`, `global_rank`) and devices (`dp_world_size`).

    Args:
        config: the checked config.
        batch: returns the present batch sizes.
        plan: where every tensor lives.
        optimizer: the engine's optimizer, None without one.
        client_optimizer: the optimizer passed to `initialize`, None for the config's.
    """

    has_moe_layers = False
    pipeline_parallelism = False
    mp_world_size = 1
    local_rank = 0
    mpu = None

    def __init__(
        self,
        *,
        config: SpmdZeroConfig,
        batch: Callable[[], BatchSizes],
        plan: ShardingPlan,
        optimizer: ZeroOptimizer | None,
        client_optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._settings, self._batch, self._plan = config, batch, plan
        self._optimizer, self._client_optimizer = optimizer, client_optimizer

    @property
    def world_size(self) -> int:
        """Number of processes, one per host, as `comm.get_world_size()` counts them."""
        return runtime.process_count()

    @property
    def global_rank(self) -> int:
        """This process's index."""
        return runtime.process_index()

    @property
    def dp_world_size(self) -> int:
        """Number of devices that train on their own rows; a factor of the train batch size."""
        return self._plan.mesh.replicas

    @property
    def seq_dp_world_size(self) -> int:
        """Number of devices that train on rows, or parts of rows, of their own."""
        return self._plan.mesh.replicas * self.sequence_parallel_size

    @property
    def sequence_parallel_size(self) -> int:
        """Number of devices that share each row; 1 without an axis ``sequence``."""
        return self._plan.mesh.sequence

    def get_sequence_parallel_group(self) -> Any:
        """The group of the devices that share rows; None unless the script has made it."""
        return row_sharers() if self.sequence_parallel_size > 1 else None

    @property
    def data_parallel_group(self) -> Any:
        """The group of all processes."""
        return comm.get_world_group()

    @property
    def seq_data_parallel_group(self) -> Any:
        """The same as `data_parallel_group`: devices that share rows are in one process."""
        return comm.get_world_group()

    @property
    def gradient_average(self) -> bool:
        """Whether the gradient is the mean over devices, not the sum."""
        return self._settings.gradient_allreduce_op == "mean"

    @functools.cached_property
    def tput_timer(self) -> ThroughputTimer:
        """The timer object, which only counts epochs."""
        return ThroughputTimer(lambda: self._batch().train)

    def get_data_parallel_rank(self) -> int:
        """This process's index; its devices hold consecutive data-parallel ranks."""
        return runtime.process_index()

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch size, micro-batch size and gradient accumulation steps.

        DeepSpeed documents these numbers; 0.19.8 returns three bound methods.
        """
        batch = self._batch()
        return batch.train, batch.micro, batch.accumulation

    def optimizer_name(self) -> str | None:
        """The class of the optimizer passed to `initialize`, else the config's name, or None."""
        if self._client_optimizer is not None:
            return type(self._client_optimizer).__name__
        if self._settings.optimizer is None:
            return None
        name = self._settings.optimizer.type
        return name.lower() if name in _LOWER_CASE_NAMES else name

    def optimizer_params(self) -> dict[str, Any] | None:
        """The config's ``optimizer.params``."""
        optimizer = self._settings.optimizer
        return dict(optimizer.params) if optimizer is not None else None

    def get_type(self) -> list[Any]:
        """The entry ``"type"`` of each param group, 0.0 where a group has none."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [group.get("type", 0.0) for group in groups]

    def scheduler_name(self) -> str | None:
        """The config's ``scheduler.type``."""
        scheduler = self._settings.scheduler
        return scheduler.type if scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """The config's ``scheduler.params``."""
        scheduler = self._settings.scheduler
        return dict(scheduler.params) if scheduler is not None else None

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is 1 or more."""
        return self._settings.zero_optimization.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are shards between micro-batches: stages 2 and 3."""
        return self._settings.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters rest as shards: stage 3."""
        return self._settings.zero_optimization.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` gathers weights that are shards: always at stage 3.

        Below stage 3 it is the config's `stage3_gather_16bit_weights_on_model_save`, as in
        DeepSpeed. Clients ask before they save a model, and save a checkpoint instead if it is
        False.
        """
        zero = self._settings.zero_optimization
        return zero.stage == 3 or zero.stage3_gather_16bit_weights_on_model_save

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the config puts optimizer states on the host; the devices update them."""
        offload = self._settings.zero_optimization.offload_optimizer
        return offload is not None and offload.device == "cpu"

    def zero_cpu_offload(self) -> bool:
        """The same as `zero_use_cpu_optimizer`: offload always goes to host memory."""
        return self.zero_use_cpu_optimizer()

    def zero_overlap_comm(self) -> bool:
        """The config's `overlap_comm`; DeepSpeed turns it on by itself in stage 3 only."""
        return bool(self._settings.zero_optimization.overlap_comm)

    def clip_fp32_gradients(self) -> None:
        """Does nothing: `step()` clips to `gradient_clipping()` in every dtype."""
        log_once("clip_fp32_gradients() has no effect of its own: engine.step() clips")

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after the reduction: not `prescale_gradients`."""
        return not self._settings.prescale_gradients

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of the gradient reduction: the config's, else the parameters'."""
        named = self._settings.reduction_data_type
        return dtype_named(named) if named is not None else self.get_data_types()[0]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters and of the gradient accumulator."""
        model = torch.float32
        if self._settings.fp16.enabled:
            model = torch.float16
        elif self._settings.bf16.enabled:
            model = torch.bfloat16
        accumulate = self._settings.data_types.grad_accum_dtype
        return model, dtype_named(accumulate) if accumulate is not None else model

    def dynamic_loss_scale(self) -> bool:
        """Whether ``fp16.loss_scale`` is 0."""
        return self._settings.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> int:
        """The first dynamic loss scale: ``2 ** initial_scale_power``."""
        return 2**self._settings.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The numbers of a dynamic loss scale, under the names of DeepSpeed's scaler."""
        fp16 = self._settings.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The dtype of ``torch_autocast``, None if the config names none."""
        named = self._settings.torch_autocast.dtype
        return dtype_named(named) if named is not None else None

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Classes whose parameters are communicated in the autocast dtype."""
        named = self._settings.torch_autocast.lower_precision_safe_modules
        return named or [f"torch.nn.modules.{name}" for name in _AUTOCAST_MODULES]

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether it is a warning or an error if processes have different checkpoint tags."""
        return self._settings.checkpoint.tag_validation != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether it is an error if processes have different checkpoint tags."""
        return self._settings.checkpoint.tag_validation == "FAIL"

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
        """Does nothing: XLA already compiles every step."""
        log_once("engine.compile() has no effect of its own: XLA compiles every step")

    def collect_python_gc(self) -> int:
        """Collects Python's garbage; returns the number of unreachable objects found."""
        return gc.collect()


def _add(name: str, read: Callable[[SpmdZeroConfig], Any], kind: Any, doc: str) -> None:
    def getter(self: ConfigGetters) -> Any:
        return read(self._settings)

    getter.__name__ = name
    getter.__qualname__ = f"ConfigGetters.{name}"
    getter.__doc__ = doc
    getter.__annotations__["return"] = kind
    setattr(ConfigGetters, name, getter)


def _add_all() -> None:
    for section, begin, words in KEYS:
        for word in words.split():
            name, _, key = word.partition("=")
            path = f"{section}{key or name}"
            kind: Any = SpmdZeroConfig
            for part in path.split("."):
                kind = kind.model_fields[part].annotation
            _add(f"{begin}{name}", operator.attrgetter(path), kind, f"The config's ``{path}``.")
    for value, why, words in FIXED:
        for name in words.split():
            _add(name, lambda _, value=value: value, type(value), f"{value}: {why}.")


_add_all()
