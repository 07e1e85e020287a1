"""The config that spmdzero honours, under DeepSpeed 0.19.8's names and defaults."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._expert_parallel import ExpertParallelConfig
from spmdzero.config._monitoring import (
    CometConfig,
    CommsLoggerConfig,
    CsvConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    WandbConfig,
)
from spmdzero.config._optimizers import optimizer_name
from spmdzero.config._precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from spmdzero.config._schedules import schedule_name
from spmdzero.config._spmd import SpmdConfig, with_replicas
from spmdzero.config._tensor_parallel import TensorParallelConfig
from spmdzero.config._types import (
    Count,
    DeepSpeedSection,
    Dtype,
    Natural,
    Rate,
    Section,
    lower,
    section_in,
    upper,
)
from spmdzero.config._zero import ZeroConfig


class ActivationCheckpointingConfig(DeepSpeedSection):
    """Where checkpointed activations are kept. What is checkpointed is the model's choice.

    Attributes:
        cpu_checkpointing: whether the inputs of checkpointed functions, and of blocks that
            ``spmd.recompute`` runs again, rest in the host's memory until backward, where programs
            have such a memory; a line says where they don't.
        partition_activations, number_checkpoints, contiguous_memory_optimization,
            synchronize_checkpoint_boundary, profile: no meaning here, see `NO_MEANING`.
    """

    partition_activations: bool = False
    number_checkpoints: Natural | None = None
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    cpu_checkpointing: bool = False


class AioConfig(DeepSpeedSection):
    """DeepSpeed's asynchronous reads and writes of NVMe."""

    block_size: Natural = 1_048_576
    queue_depth: Natural = 8
    intra_op_parallelism: Natural = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class ThroughputTimerConfig(DeepSpeedSection):
    """DeepSpeed's timer of samples per second."""

    enabled: bool = True
    synchronized: bool = True


class TimersConfig(DeepSpeedSection):
    """DeepSpeed's timers."""

    throughput: ThroughputTimerConfig = ThroughputTimerConfig()


class CompileConfig(DeepSpeedSection):
    """DeepCompile, DeepSpeed's compiler passes; a pass may stay if the mesh does what it does."""

    deepcompile: bool = False
    autoep_non_moe: bool = False
    free_activation: bool = False
    free_activation_threshold: Natural = 10 * 1024 * 1024
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    debug_log: bool = False
    offload_parameters: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    keep_int_input_tensors: bool = True
    keep_all_input_tensors: bool = False
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = None


class ParallelWriteConfig(DeepSpeedSection):
    """Says which of DeepSpeed's ranks write a checkpoint."""

    pipeline_stage: bool = False


class CheckpointConfig(DeepSpeedSection):
    """How checkpoints are written. The first three keys are spmdzero's, the others DeepSpeed's.

    Attributes:
        asynchronous: ``async`` in JSON: whether `save_checkpoint` returns as soon as the state is
            in the host's memory, and files are written while training goes on.
        keep_last: number of newest checkpoints to keep; older ones that `latest` once named are
            deleted when a new one is complete. None keeps all.
        keep_every: checkpoints whose global step is a multiple of this number are kept too.
        load_universal: whether `load_checkpoint` without a tag takes the tag in `latest_universal`
            instead of the one in `latest`. The format itself is recognised.
        use_node_local_storage: whether each host has a folder of its own; refused on several
            hosts, which write into one folder.
        tag_validation: what to do if the hosts don't name the same tag.
        checkpoint_serialization, parallel_write, writer: see `NO_MEANING`.
    """

    asynchronous: bool = Field(default=False, alias="async")
    keep_last: Count | None = None
    keep_every: Count | None = None
    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(upper)] = "WARN"
    load_universal: bool = False
    use_node_local_storage: bool = False
    checkpoint_serialization: bool = True
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    writer: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _every_needs_last(self) -> "CheckpointConfig":
        if self.keep_every is not None and self.keep_last is None:
            raise RefusedValueError(
                "without keep_last nothing is deleted, so there is nothing to keep",
                fix='Add "keep_last": 2, for example.',
                at=("keep_every",),
            )
        return self


def _never_is_none(value: object) -> object:
    # accelerate writes infinity for "never print", which some files have as a string.
    words = isinstance(value, str) and value.lower() in ("inf", "infinity")
    return None if words or value == math.inf else value


_LOWER = BeforeValidator(lower)
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class OptimizerConfig(Section):
    """The optimizer that the engine builds.

    Attributes:
        type: the optimizer's name; "Adam" means AdamW unless ``adam_w_mode`` is false.
        params: its parameters as the user wrote them, checked by `load_config`.
        legacy_fusion: has no effect, see `NO_MEANING`.
    """

    type: Annotated[str, AfterValidator(optimizer_name)]
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class SchedulerConfig(Section):
    """The learning-rate schedule that the engine builds.

    Attributes:
        type: one of DeepSpeed's schedules or a class of torch.optim.lr_scheduler, by name.
        params: its parameters as the user wrote them, checked by `load_config`.
    """

    type: Annotated[str, AfterValidator(schedule_name)]
    params: dict[str, Any] = Field(default_factory=dict)


class SpmdZeroConfig(Section):
    """A checked config; build it with `load_config`.

    Attributes:
        train_batch_size: number of samples that one optimizer step consumes on all devices.
        train_micro_batch_size_per_gpu: number of samples that one device sees in one forward.
        gradient_accumulation_steps: number of micro-batches between two optimizer steps.
        managed_gradient_accumulation: whether the engine counts micro-batches; if not, each step()
            is a gradient accumulation boundary.
        steps_per_print: number of optimizer steps between two progress lines, at which the engine
            also reads whether the replicas agree; None prints none.
        gradient_clipping: largest global L2 norm of the gradient; 0 turns clipping off.
        prescale_gradients: whether gradients are divided by the data-parallel size before they are
            summed instead of afterwards.
        gradient_predivide_factor: divisor of gradients before they are summed, if they aren't
            prescaled; the rest of the division follows the sum.
        gradient_allreduce_op: whether the gradient is the data-parallel mean or the sum.
        communication_data_type: dtype in which gradients are reduced; None means the parameters'.
        seq_parallel_communication_data_type: the same where devices share rows; null means the
            parameters' dtype.
        dataloader_drop_last: whether the loader drops the last incomplete batch.
        zero_allow_untested_optimizer: whether ZeRO accepts an optimizer that DeepSpeed hasn't
            tested with it.
        wall_clock_breakdown: whether the time of forward, backward and step is logged.
        memory_breakdown: whether the memory of parameters and states is logged after steps.
        dump_state: whether the config and the engine's state are logged at construction.
        log_level: level of the logger "spmdzero"; None doesn't change it.
        data_parallel_size: number of replicas, each with rows of its own: ``data`` times ``fsdp``
            of the mesh; 0 takes what the other axes leave.
        sequence_parallel_size: number of devices that share each row, the size of the mesh's axis
            ``sequence``; 0 and 1 turn it off.
        allgather_size, disable_allgather, disable_python_gc, pipeline,
            use_data_before_expert_parallelism, vocabulary_size, zero_force_ds_cpu_optimizer: see
            `NO_MEANING`.
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
    seq_parallel_communication_data_type: Dtype | None = "fp32"
    zero_allow_untested_optimizer: bool = False
    dataloader_drop_last: bool = False
    data_parallel_size: Natural = 0
    sequence_parallel_size: Natural = 1
    allgather_size: Natural = 500_000_000
    disable_allgather: bool = False
    disable_python_gc: bool = False
    pipeline: dict[str, Any] | None = None
    use_data_before_expert_parallelism: bool = False
    vocabulary_size: Natural | None = None
    zero_force_ds_cpu_optimizer: bool = True
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Annotated[LogLevel | None, _LOWER] = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_optimization: ZeroConfig = ZeroConfig()
    bf16: Bf16Config = Bf16Config()
    fp16: Fp16Config = Fp16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CsvConfig = CsvConfig()
    comet: CometConfig = CometConfig()
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    aio: AioConfig = AioConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    timers: TimersConfig = TimersConfig()
    compile: CompileConfig = CompileConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    spmd: SpmdConfig = SpmdConfig()

    _source: dict[str, Any] = PrivateAttr(default_factory=dict)
    _no_meaning: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Number of devices on each mesh axis; -1 takes the remaining ones."""
        named = {axis: size for axis, (_, size) in self.axis_keys.items() if size > 1}
        return with_replicas(self.spmd.mesh | named, self.data_parallel_size)

    @property
    def axis_keys(self) -> dict[str, tuple[str, int]]:
        """Axis -> DeepSpeed's key for it, and the size that the key has; 0 and 1 turn it off."""
        return {
            "sequence": ("sequence_parallel_size", self.sequence_parallel_size),
            "tensor": ("tensor_parallel.autotp_size", self.tensor_parallel.autotp_size),
        }

    @property
    def shares_rows(self) -> bool:
        """Whether devices share the rows of a replica, by the mesh's axis ``sequence``."""
        return self.mesh_axes.get("sequence", 1) not in (0, 1)

    @property
    def reduction_data_type(self) -> str | None:
        """The dtype in which gradients are reduced; None for the parameters'.

        As in DeepSpeed (runtime/engine.py, `_configure_distributed_model`), where devices share
        rows their own key replaces `communication_data_type`, even when neither is given.
        """
        if self.shares_rows:
            return self.seq_parallel_communication_data_type
        return self.communication_data_type

    @property
    def source(self) -> dict[str, Any]:
        """The user's config as it was written, a copy that this object owns."""
        return self._source

    @property
    def no_meaning(self) -> dict[str, str]:
        """Dotted names of the keys in `source` that have no effect -> why.

        They are those of `NO_MEANING`, and keys that the config's other keys leave without effect.
        """
        return self._no_meaning


def _sections(model: type[Section], at: str) -> Iterator[tuple[str, type[Section]]]:
    yield at, model
    for key, name in model.json_keys().items():
        if section := section_in(model.model_fields[name].annotation):
            yield from _sections(section, f"{at}.{key}".lstrip("."))


SECTIONS = dict(_sections(SpmdZeroConfig, at=""))
"""Path of a section -> its model; of a list of sections, that of its entries."""
