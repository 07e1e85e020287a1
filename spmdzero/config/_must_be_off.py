"""A table of DeepSpeed's keys that are accepted only while they ask for nothing."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OffValue:
    """A key that is accepted only with a value that asks for nothing.

    Attributes:
        off: the value that asks for nothing, or a tuple of such values; None always does.
        reason: why other values can't be honoured.
        fix: what to do instead.
    """

    off: Any = False
    reason: str
    fix: str = "Remove the key."


@dataclass(frozen=True, kw_only=True)
class OffSection:
    """A section that is accepted only while every key in ``off`` asks for nothing.

    Attributes:
        off: the keys that decide, each with the value, or a tuple of values, that ask for nothing.
        idle: keys that may hold anything while the section is off.
        reason: why the section can't be honoured.
        fix: what to do instead.
    """

    off: dict[str, Any]
    idle: tuple[str, ...] = ()
    reason: str
    fix: str = "Turn it off or remove the section."


def _names(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_ENABLED = {"enabled": False}

_PRECISION: dict[str, OffValue | OffSection] = {
    "data_types.buffer_dtype": OffValue(
        off=None,
        reason="buffers keep the model's dtype",
        fix="Remove the key and convert the buffers of the model.",
    ),
    "fp16.fp16_master_weights_and_grads": OffValue(
        reason="it trains on fp16 master weights, which only DeepSpeedCPUAdam does",
        fix='Write false, and "offload_optimizer": {"device": "cpu"} for fp32 masters on the host.',
    ),
}

_ZERO: dict[str, OffValue | OffSection] = {
    "zenflow": OffValue(
        off=None,
        reason="it updates most weights later than others, with gradients of several steps",
        fix='Remove it; "offload_optimizer": {"device": "cpu"} updates all at each step.',
    ),
    "compute_grad_norm": OffValue(
        off=True,
        reason="the compiled step always has the norm, which costs one scalar reduction",
        fix='Write true; "gradient_clipping": 0 turns clipping off.',
    ),
    "legacy_stage1": OffValue(reason="DeepSpeed removed its first implementation of stage 1"),
    "zero_quantized_nontrainable_weights": OffValue(
        reason="frozen parameters rest in their own dtype",
        fix='Remove the key; "zero_quantized_weights": true has them cross in int8.',
    ),
}

_FEATURES: dict[str, OffValue | OffSection] = {
    "autotuning": OffSection(
        off=_ENABLED,
        idle=_names(
            "arg_mappings end_profile_step exps_dir fast max_train_batch_size "
            "max_train_micro_batch_size_per_gpu metric metric_path min_train_batch_size "
            "min_train_micro_batch_size_per_gpu model_info model_info_path mp_size "
            "num_tuning_micro_batch_sizes overwrite results_dir start_profile_step "
            "tuner_early_stopping tuner_num_trials tuner_type"
        ),
        reason="it runs the script several times to choose a stage and a batch for DeepSpeed",
        fix="Turn it off; `spmdzero explain` tells whether a stage and a batch fit, and how fast.",
    ),
    "data_efficiency": OffSection(
        off=_ENABLED,
        idle=_names("data_routing data_sampling seed"),
        reason="its curriculum orders the samples, and spmdzero's loader reads the dataset in the "
        "sampler's order",
        fix="Turn off its data_sampling, and pass a DataLoader with a sampler of your own.",
    ),
    "datastates_ckpt": OffValue(
        reason="checkpoints are written by spmdzero itself",
        fix='Remove the section; "checkpoint": {"async": true} saves while training goes on.',
    ),
    "hybrid_engine": OffSection(
        off=_ENABLED,
        idle=_names(
            "max_out_tokens inference_tp_size release_inference_cache pin_parameters "
            "tp_gather_partition_size enable_cuda_graph"
        ),
        reason="spmdzero trains, it has no inference engine",
    ),
    **{
        # accelerate writes the first two of them into a DeepSpeed JSON.
        name: OffSection(
            off=_ENABLED,
            idle=_names("opt_level use_te"),
            reason="its products of fp8 are CUDA's",
            fix='Write "spmd": {"products": {"dtype": "fp8"}} in its place.',
        )
        for name in ("msamp", "ms_amp", "transformer_engine")
    },
    "weight_quantization": OffSection(
        off={"enabled": False, "quantized_initialization": {}, "post_init_quant": {}},
        idle=_names("num_bits q_type q_groups"),
        reason="it belongs to DeepSpeed's inference",
    ),
}

OFF_ONLY: dict[str, OffValue | OffSection] = {
    **_PRECISION,
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO.items()},
    **_FEATURES,
}
"""Dotted name of a key -> the values that it may hold."""
