"""Keys whose effect depends on others: where they have none, and why."""

from collections.abc import Iterator

from spmdzero._names import dotted
from spmdzero.config._models import SpmdZeroConfig

FP16_WITHOUT_ZERO = (
    "fp16 without ZeRO: the loss is multiplied by the loss scale, and the gradients are divided by "
    "it. DeepSpeed 0.19.8 leaves out the multiplication there and hardly trains "
    "(docs/coming_from_deepspeed.md)"
)
"""What a run with `fp16` at stage 0 says."""

_OF_STAGE_3 = (
    *dotted("""
    zero_optimization: cpu_offload_param stage3_model_persistence_threshold
    stage3_param_persistence_threshold zero_hpz_partition_size
    zero_optimization.offload_param: device
"""),
)


def without_effect_beside(config: SpmdZeroConfig) -> dict[str, str]:
    """The keys that the config's other keys leave without effect, each with the reason."""
    return dict(_found(config))


def _found(config: SpmdZeroConfig) -> Iterator[tuple[str, str]]:
    stage = config.zero_optimization.stage
    if stage < 3:
        for key in _OF_STAGE_3:
            yield (
                key,
                f"it concerns parameters that are sharded at stage 3, and the stage is {stage}",
            )
    if config.shares_rows:
        yield (
            "communication_data_type",
            "devices share rows, so that seq_parallel_communication_data_type decides, as in "
            "DeepSpeed (fp32 unless it is given)",
        )
    else:
        yield (
            "seq_parallel_communication_data_type",
            "it is the dtype in which gradients are reduced where devices share rows "
            "(sequence_parallel_size), and they don't",
        )
    if not _order_counts(config):
        yield (
            "zero_optimization.reduce_scatter",
            "the plan decides which collective reduces, and the key's other effects are on fp16 "
            "gradients below stage 3 and on prescaling",
        )


def _order_counts(config: SpmdZeroConfig) -> bool:
    """Whether `reduce_scatter` decides about the division of gradients, or permits a key."""
    if config.gradient_allreduce_op == "sum" or not config.zero_optimization.stage:
        return False
    asked = config.prescale_gradients or config.gradient_predivide_factor != 1.0
    return asked or (config.fp16.enabled and config.zero_optimization.stage < 3)
