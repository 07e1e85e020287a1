"""DeepSpeed's keys that are accepted only while they ask for nothing, as a table."""

from dataclasses import dataclass
from typing import Any

_LATER = "this is not in this release"


@dataclass(frozen=True, kw_only=True)
class OffValue:
    """A key that is accepted only with a value that asks for nothing.

    Attributes:
        off: the value that asks for nothing; None always does.
        reason: why another value can't be honoured.
        fix: what to do instead.
    """

    off: Any = False
    reason: str = _LATER
    fix: str = "Remove the key."


@dataclass(frozen=True, kw_only=True)
class OffSection:
    """A section that is accepted only while every key in ``off`` asks for nothing.

    Attributes:
        off: the keys that decide, each with the value that asks for nothing.
        idle: keys that may hold anything while the section is off; None allows any key.
        reason: why the section can't be honoured.
        fix: what to do instead.
    """

    off: dict[str, Any]
    idle: tuple[str, ...] | None = ()
    reason: str = _LATER
    fix: str = "Turn it off or remove the section."


def _names(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_ENABLED = {"enabled": False}
_NO_OFFLOAD = "optimizer states are sharded over the devices' memory, spmdzero doesn't offload them"
_NO_PARAM_OFFLOAD = "parameters stay replicated in the devices' memory, spmdzero doesn't offload"
_MORE_DEVICES = "Turn it off, and use stage 2 or more devices where memory is short."
_ONE_PARALLELISM = "spmdzero shards the states of data parallelism and knows no other parallelism"
_KEEP_DEFAULT = "Keep DeepSpeed's default or remove the key."

_OFFLOAD_KEYS = _names(
    "nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc"
)

_PRECISION: dict[str, OffValue | OffSection] = {
    "data_types.buffer_dtype": OffValue(off=None, reason="buffers keep the model's dtype"),
}

_ZERO: dict[str, OffValue | OffSection] = {
    "cpu_offload": OffValue(reason=_NO_OFFLOAD, fix=_MORE_DEVICES),
    "cpu_offload_param": OffValue(reason=_NO_PARAM_OFFLOAD, fix=_MORE_DEVICES),
    "cpu_offload_use_pin_memory": OffValue(reason=_NO_OFFLOAD, fix=_MORE_DEVICES),
    "offload_optimizer": OffSection(
        off={"device": "none"}, idle=_OFFLOAD_KEYS, reason=_NO_OFFLOAD, fix=_MORE_DEVICES
    ),
    "offload_param": OffSection(
        off={"device": "none"}, idle=_OFFLOAD_KEYS, reason=_NO_PARAM_OFFLOAD, fix=_MORE_DEVICES
    ),
    "zenflow": OffValue(off=None, reason=_NO_OFFLOAD, fix=_MORE_DEVICES),
    "compute_grad_norm": OffValue(off=True, fix=_KEEP_DEFAULT),
    "elastic_checkpoint": OffValue(),
    "enable_sanity_checks": OffValue(fix='Use "spmd": {"check_finite": true} or remove the key.'),
    "ignore_unused_parameters": OffValue(off=True, fix=_KEEP_DEFAULT),
    "legacy_stage1": OffValue(reason="there is one implementation of stage 1"),
    "load_from_fp32_weights": OffValue(off=True, fix=_KEEP_DEFAULT),
    "parameter_alignment": OffValue(reason="the sharding plan decides the padding"),
    "pipeline_loading_checkpoint": OffValue(),
    "save_muon_momentum_buffer_in_memory": OffValue(),
    "zero_hpz_partition_size": OffValue(off=1, reason="parameters stay replicated"),
    "zero_quantized_gradients": OffValue(reason="collectives run in fp32 or bf16"),
    "zero_quantized_nontrainable_weights": OffValue(reason="collectives run in fp32 or bf16"),
    "zero_quantized_weights": OffValue(reason="collectives run in fp32 or bf16"),
}

_TOP_LEVEL: dict[str, OffValue | OffSection] = {
    "optimizer.legacy_fusion": OffValue(reason="XLA compiles the update", fix="Write false."),
}

_PARALLELISM: dict[str, OffValue | OffSection] = {
    key: OffValue(off=off, reason=_ONE_PARALLELISM)
    for key, off in {
        "pipeline": {},
        "seq_parallel_communication_data_type": "fp32",
        "sequence_parallel_size": 1,
        "use_data_before_expert_parallelism": False,
    }.items()
} | {
    "expert_parallel": OffSection(off=_ENABLED, idle=None, reason=_ONE_PARALLELISM),
    "tensor_parallel": OffSection(off={"autotp_size": 0}, idle=None, reason=_ONE_PARALLELISM),
}

# A nested section stands before its parent, which must then be empty but for its own keys.
_FEATURES: dict[str, OffValue | OffSection] = {
    "aio": OffSection(
        off={
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        },
        reason="it tunes offloading to NVMe, which spmdzero doesn't do",
        fix="Remove the section.",
    ),
    "autotuning": OffSection(off=_ENABLED, idle=None),
    "checkpoint.parallel_write": OffSection(off={"pipeline_stage": False}),
    "checkpoint": OffSection(
        off={
            "tag_validation": "WARN",
            "load_universal": False,
            "use_node_local_storage": False,
            "checkpoint_serialization": True,
            "writer": None,
        },
        fix=_KEEP_DEFAULT,
    ),
    "comet": OffSection(
        off=_ENABLED,
        idle=_names(
            "samples_log_interval project workspace api_key experiment_name experiment_key "
            "online mode"
        ),
    ),
    "compile": OffSection(
        off={"deepcompile": False},
        idle=_names(
            "autoep_non_moe free_activation free_activation_threshold offload_activation "
            "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory "
            "debug_log offload_parameters sync_before_reduce sync_after_reduce "
            "sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors passes"
        ),
        reason="XLA compiles the step",
    ),
    "data_efficiency": OffSection(off=_ENABLED, idle=None),
    "datastates_ckpt": OffValue(),
    "hybrid_engine": OffSection(
        off=_ENABLED,
        idle=_names(
            "max_out_tokens inference_tp_size release_inference_cache pin_parameters "
            "tp_gather_partition_size enable_cuda_graph"
        ),
    ),
    "timers.throughput": OffSection(off=_ENABLED, idle=("synchronized",)),
    "timers": OffSection(off={}),
    "weight_quantization": OffValue(off={}, reason="it belongs to DeepSpeed's inference"),
}

OFF_ONLY: dict[str, OffValue | OffSection] = {
    **_PRECISION,
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO.items()},
    **_TOP_LEVEL,
    **_PARALLELISM,
    **_FEATURES,
}
"""What each key may hold, by its dotted name."""
