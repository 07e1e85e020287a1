"""The sections that have no effect under SPMD; `NO_MEANING` tells why, key by key."""

from spmdzero.config._types import DeepSpeedSection, Natural


class ActivationCheckpointingConfig(DeepSpeedSection):
    """Where DeepSpeed keeps checkpointed activations; here the compiler decides.

    The model chooses what is recomputed. `NO_MEANING` tells why no key has an effect, and
    ``cpu_checkpointing`` is refused unless it is false.
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
