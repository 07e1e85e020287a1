"""The sections that change nothing under SPMD; `NO_MEANING` tells why, key by key."""

from typing import Annotated

from spmdzero.config._types import DeepSpeedSection, Natural, NullIsEmpty


class AioConfig(DeepSpeedSection):
    """DeepSpeed's asynchronous reads and writes of offloaded tensors."""

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

    throughput: Annotated[ThroughputTimerConfig, NullIsEmpty] = ThroughputTimerConfig()
