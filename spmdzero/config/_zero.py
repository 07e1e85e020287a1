"""The section ``zero_optimization``."""

import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._types import DeepSpeedSection, Natural, lower


def _no_disk(device: str) -> str:
    if device == "nvme":
        raise RefusedValueError(
            "spmdzero doesn't offload to NVMe",
            fix='Write "cpu", which is host memory, or use stage 3 and more devices.',
        )
    return device


_Device = Annotated[
    Literal["none", "cpu", "nvme"], BeforeValidator(lower), AfterValidator(_no_disk)
]
_Share = Annotated[float, Field(ge=0, le=1)]


class OffloadOptimizerConfig(DeepSpeedSection):
    """Where master weights and optimizer states rest between steps; other keys have no effect.

    Attributes:
        device: "cpu" for host memory, if the backend and the devices support it.
    """

    device: _Device = "none"
    nvme_path: str | None = None
    ratio: _Share = 1.0
    buffer_count: Natural = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    super_offload: bool = False
    cpuadam_cores_perc: _Share = 0.8


class OffloadParamConfig(DeepSpeedSection):
    """Where the parameters of stage 3 rest between steps; other keys have no effect.

    Attributes:
        device: "cpu" for host memory, if the backend and the devices support it; it has no effect
            below stage 3, as in DeepSpeed.
    """

    device: _Device = "none"
    nvme_path: str | None = None
    buffer_count: Natural = 5
    buffer_size: Natural = 100_000_000
    max_in_cpu: Natural = 1_000_000_000
    pin_memory: bool = True


class ZeroConfig(DeepSpeedSection):
    """Says which states ZeRO shards; other keys belong to a hand-written communication engine.

    Attributes:
        stage: 0 shards nothing, 1 the optimizer state, 2 also the gradient between micro-batches, 3
            also the parameters.
        cpu_offload: an older spelling of ``"offload_optimizer": {"device": "cpu"}``.
        cpu_offload_param: an older spelling of ``"offload_param": {"device": "cpu"}``.
        reduce_scatter: whether fp16 gradients are divided by the number of replicas before they are
            summed, as by DeepSpeed's reduce-scatter; false divides the sum below stage 3, and
            permits `prescale_gradients` and `gradient_predivide_factor` at stages 2 and 3. Which
            collective sums is the plan's decision.
        stage3_param_persistence_threshold: at stage 3, parameters with at most this number of
            elements stay whole.
        stage3_model_persistence_threshold: largest number of elements that stay whole at stage 3,
            counted over the parameters in the module's order.
        zero_hpz_partition_size: at stage 3, the number of neighbouring devices that share one copy
            of the parameters, and gather within their group; all devices share the gradients,
            masters and moments. 0, 1, and all devices or more have all share the parameters too.
        zero_quantized_weights: at stage 3, whether parameters cross in int8, each row of a device's
            shard with a scale, and are computed with as they come out of it (ZeRO++'s qwZ). No
            effect below stage 3, as in DeepSpeed; JAX.
        zero_quantized_gradients: at stage 3, whether gradients of matrices cross in int8, each row
            of what goes to one device with a scale, and are summed in fp32 (ZeRO++'s qgZ, which
            sends 4 bits there). No effect below stage 3, as in DeepSpeed; JAX.
    """

    stage: Natural = 0
    allgather_bucket_size: Natural = 500_000_000
    allgather_partitions: bool = True
    contiguous_gradients: bool = True
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    elastic_checkpoint: bool = False
    enable_sanity_checks: bool = False
    ignore_unused_parameters: bool = True
    leaf_module: dict[str, Any] | None = None
    load_from_fp32_weights: bool = True
    log_trace_cache_warnings: bool = False
    memory_efficient_linear: bool = True
    offload_optimizer: OffloadOptimizerConfig | None = None
    offload_param: OffloadParamConfig | None = None
    overlap_comm: bool | None = None
    override_module_apply: bool = True
    parameter_alignment: bool = False
    pipeline_loading_checkpoint: bool = False
    reduce_bucket_size: Natural = 500_000_000
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    stage3_allgather_sequential: bool = False
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_max_live_parameters: Natural = 1_000_000_000
    stage3_max_reuse_distance: Natural = 1_000_000_000
    stage3_model_persistence_threshold: Natural = sys.maxsize
    stage3_module_granularity_threshold: Natural = 0
    stage3_param_persistence_threshold: Natural = 100_000
    stage3_prefetch_bucket_size: Natural = 50_000_000
    stage3_use_all_reduce_for_fetch_params: bool = False
    sub_group_size: Natural = 1_000_000_000
    use_multi_rank_bucket_allreduce: bool = True
    zero_hpz_partition_size: Natural = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False

    @field_validator("stage")
    @classmethod
    def _has_a_plan(cls, stage: int) -> int:
        if stage > 3:
            raise RefusedValueError("there is no such ZeRO stage", fix="Use stage 0, 1, 2 or 3.")
        return stage
