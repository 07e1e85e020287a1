"""The sections that change nothing under SPMD; `NO_MEANING` tells why, key by key."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from spmdzero.config._types import Natural, NullIsEmpty, Section, upper


class AioConfig(Section):
    """DeepSpeed's asynchronous reads and writes of offloaded tensors."""

    block_size: Natural = 1_048_576
    queue_depth: Natural = 8
    intra_op_parallelism: Natural = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class ParallelWriteConfig(Section):
    """Which ranks write a checkpoint."""

    pipeline_stage: bool = False


class CheckpointConfig(Section):
    """How DeepSpeed writes a checkpoint."""

    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], BeforeValidator(upper)] = "WARN"
    use_node_local_storage: bool = False
    checkpoint_serialization: bool = True
    parallel_write: Annotated[ParallelWriteConfig, NullIsEmpty] = ParallelWriteConfig()
    writer: dict[str, Any] | None = None


class ThroughputTimerConfig(Section):
    """DeepSpeed's timer of samples per second."""

    enabled: bool = True
    synchronized: bool = True


class TimersConfig(Section):
    """DeepSpeed's timers."""

    throughput: Annotated[ThroughputTimerConfig, NullIsEmpty] = ThroughputTimerConfig()
