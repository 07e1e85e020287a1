"""The config that spmdzero honours, under DeepSpeed 0.19.8's names and defaults."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from spmdzero.config._activation import ActivationCheckpointingConfig
from spmdzero.config._checkpoint import CheckpointConfig, ParallelWriteConfig
from spmdzero.config._monitoring import (
    CommsLoggerConfig,
    CsvConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    WandbConfig,
)
from spmdzero.config._params import check_schedule_name, optimizer_name
from spmdzero.config._precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from spmdzero.config._spmd import SpmdConfig
from spmdzero.config._types import Count, Dtype, Natural, NullIsEmpty, Rate, Section, lower
from spmdzero.config._without_effect import AioConfig, ThroughputTimerConfig, TimersConfig
from spmdzero.config._zero import ZeroConfig


def _never_is_none(value: object) -> object:
    # accelerate writes infinity for "never print".
    return None if isinstance(value, float) and value == math.inf else value


_LOWER = BeforeValidator(lower)
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
_Params = Annotated[dict[str, Any], NullIsEmpty]


class OptimizerConfig(Section):
    """The optimizer that the engine builds.

    Attributes:
        type: the optimizer's name; "Adam" means AdamW unless ``adam_w_mode`` is false.
        params: its parameters as the user wrote them, checked by `load_config`.
        legacy_fusion: no meaning here, see `NO_MEANING`.
    """

    type: Annotated[str, AfterValidator(optimizer_name)]
    params: _Params = Field(default_factory=dict)
    legacy_fusion: bool = False


class SchedulerConfig(Section):
    """The learning-rate schedule that the engine builds.

    Attributes:
        type: one of DeepSpeed's schedules or a class of torch.optim.lr_scheduler, by name.
        params: its parameters as the user wrote them, checked by `load_config`.
    """

    type: Annotated[str, AfterValidator(check_schedule_name)]
    params: _Params = Field(default_factory=dict)


class SpmdZeroConfig(Section):
    """A checked config; build it with `load_config`.

    Attributes:
        train_batch_size: samples that one optimizer step consumes on all devices.
        train_micro_batch_size_per_gpu: samples that one device sees in one forward.
        gradient_accumulation_steps: micro-batches between two optimizer steps.
        managed_gradient_accumulation: whether the engine counts micro-batches; else each step()
            is a gradient accumulation boundary.
        steps_per_print: optimizer steps between two progress lines, where it is also read whether
            the replicas agree; None prints none.
        gradient_clipping: largest global L2 norm of the gradient; 0 turns clipping off.
        prescale_gradients: whether gradients are divided by the data-parallel size before they
            are summed rather than afterwards.
        gradient_predivide_factor: what gradients are divided by before they are summed, when
            they aren't prescaled; the rest of the division follows the sum.
        gradient_allreduce_op: whether the gradient is the data-parallel mean or the sum.
        communication_data_type: dtype of the collectives; None means the gradient's.
        dataloader_drop_last: whether the loader drops the last incomplete batch.
        zero_allow_untested_optimizer: whether ZeRO takes an optimizer that DeepSpeed hasn't
            tested with it.
        wall_clock_breakdown: whether the time of forward, backward and step is logged.
        memory_breakdown: whether memory is logged at each of them.
        dump_state: whether the config and the engine's state are logged at construction.
        log_level: level of the logger "spmdzero"; None leaves it.
        allgather_size, disable_allgather, disable_python_gc, pipeline,
            seq_parallel_communication_data_type, use_data_before_expert_parallelism,
            vocabulary_size, zero_force_ds_cpu_optimizer: see `NO_MEANING`.
    """

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    managed_gradient_accumulation: bool = True
    steps_per_print: Annotated[Count | None, BeforeValidator(_never_is_none)] = None
    gradient_clipping: Rate = 1.0
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], _LOWER] = "mean"
    communication_data_type: Dtype | None = None
    zero_allow_untested_optimizer: bool = False
    dataloader_drop_last: bool = False
    allgather_size: Natural = 500_000_000
    disable_allgather: bool = False
    disable_python_gc: bool = False
    pipeline: dict[str, Any] | None = None
    seq_parallel_communication_data_type: Dtype | None = "fp32"
    use_data_before_expert_parallelism: bool = False
    vocabulary_size: Natural | None = None
    zero_force_ds_cpu_optimizer: bool = True
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Annotated[LogLevel | None, _LOWER] = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_optimization: Annotated[ZeroConfig, NullIsEmpty] = ZeroConfig()
    bf16: Annotated[Bf16Config, NullIsEmpty] = Bf16Config()
    fp16: Annotated[Fp16Config, NullIsEmpty] = Fp16Config()
    torch_autocast: Annotated[TorchAutocastConfig, NullIsEmpty] = TorchAutocastConfig()
    data_types: Annotated[DataTypesConfig, NullIsEmpty] = DataTypesConfig()
    activation_checkpointing: Annotated[ActivationCheckpointingConfig, NullIsEmpty] = (
        ActivationCheckpointingConfig()
    )
    tensorboard: Annotated[TensorBoardConfig, NullIsEmpty] = TensorBoardConfig()
    wandb: Annotated[WandbConfig, NullIsEmpty] = WandbConfig()
    csv_monitor: Annotated[CsvConfig, NullIsEmpty] = CsvConfig()
    flops_profiler: Annotated[FlopsProfilerConfig, NullIsEmpty] = FlopsProfilerConfig()
    comms_logger: Annotated[CommsLoggerConfig, NullIsEmpty] = CommsLoggerConfig()
    aio: Annotated[AioConfig, NullIsEmpty] = AioConfig()
    checkpoint: Annotated[CheckpointConfig, NullIsEmpty] = CheckpointConfig()
    timers: Annotated[TimersConfig, NullIsEmpty] = TimersConfig()
    spmd: SpmdConfig = SpmdConfig()

    _source: dict[str, Any] = PrivateAttr(default_factory=dict)
    _no_meaning: tuple[str, ...] = PrivateAttr(default=())

    @property
    def source(self) -> dict[str, Any]:
        """The user's config as it was written, a copy that this object owns."""
        return self._source

    @property
    def no_meaning(self) -> tuple[str, ...]:
        """Dotted names of the keys in `source` that `NO_MEANING` lists."""
        return self._no_meaning


SECTIONS: dict[str, type[Section]] = {
    "": SpmdZeroConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "zero_optimization": ZeroConfig,
    "bf16": Bf16Config,
    "fp16": Fp16Config,
    "torch_autocast": TorchAutocastConfig,
    "data_types": DataTypesConfig,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CsvConfig,
    "flops_profiler": FlopsProfilerConfig,
    "comms_logger": CommsLoggerConfig,
    "aio": AioConfig,
    "checkpoint": CheckpointConfig,
    "checkpoint.parallel_write": ParallelWriteConfig,
    "timers": TimersConfig,
    "timers.throughput": ThroughputTimerConfig,
    "spmd": SpmdConfig,
}
"""The model of each section, by the section's path."""
