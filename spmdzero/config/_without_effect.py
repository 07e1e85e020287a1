"""The sections that have no effect under SPMD; `NO_MEANING` tells why, key by key."""

from typing import Literal

from spmdzero.config._types import DeepSpeedSection, Natural


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
