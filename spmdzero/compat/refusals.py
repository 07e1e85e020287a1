"""DeepSpeed's names that spmdzero refuses: why, and what to use instead."""

import dataclasses
import importlib
import importlib.util
from typing import Any, NoReturn

from spmdzero.errors import RefusedNameError, SpmdZeroUsageError


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Attributes.

    reason: why the name can't be honoured.
    instead: what works in its place.
    """

    reason: str
    instead: str


_PARALLEL = Refusal(
    "spmdzero is data-parallel ZeRO-1/2; there is no tensor, pipeline or expert parallelism",
    "Train with `spmdzero.initialize`; models that don't fit need another tool",
)
_INFERENCE = Refusal(
    "spmdzero trains; it has no inference engine and no kernels to inject",
    "Call `engine.eval()` and `engine(...)`, or load the saved weights into the plain module",
)
_STAGE_3 = Refusal(
    "ZeRO-3 partitions parameters; at stages 1 and 2 every device holds them whole",
    "Use the parameters directly; `spmdzero.local_shards(tensor)` shows what each device holds",
)
_HOST = Refusal(
    "optimizers run on the devices, inside the compiled step; nothing is offloaded to the host",
    'Write "optimizer": {"type": "AdamW", ...} (or Adagrad, Lion) into the config',
)
_BUFFERS = Refusal(
    "it belongs to DeepSpeed's flat buffers and buckets; here the compiler places collectives",
    "Read tensors by `spmdzero.utils.safe_get_full_fp32_param` and its siblings, and collectives "
    "by `spmdzero.record_ledgers(engine)`",
)
_TUNING = Refusal(
    "it belongs to a DeepSpeed feature that is neither ZeRO-1/2 nor refused by its config key",
    "Leave the feature out of the config",
)
_COMM_LOG = Refusal(
    "collectives are part of the compiled step, no call of Python's starts one",
    "Read them from the program: `with spmdzero.record_ledgers(engine) as ledgers:`",
)
_BACKENDS = Refusal(
    "hosts are connected by gloo and devices by XLA; there is no other backend to set up",
    "Call `spmdzero.init_distributed()`",
)
_STREAMS = Refusal(
    "XLA orders and overlaps the work of a compiled program by itself, and has no streams",
    "Leave it out; `get_accelerator().synchronize()` waits for the devices",
)
_BUILD = Refusal(
    "nothing is compiled from C++ or Triton; XLA makes the kernels",
    "Leave it out",
)
_PINNED = Refusal(
    "XLA copies from ordinary host memory",
    "Leave it out; the loader prefetches to the devices",
)
_ARGUMENTS = Refusal(
    "schedules are read from the config, not from command-line arguments",
    'Write "scheduler": {"type": ..., "params": {...}} into the config',
)
_COMPILE = Refusal(
    "the step is compiled by XLA already, forward, backward and update together",
    "Leave the call out",
)
_CHECKPOINT_FILES = Refusal(
    "it names the files of one rank; spmdzero has one process per host and no ranks of devices",
    "Use `engine.save_checkpoint` and `engine.load_checkpoint`",
)
_WRITERS = Refusal(
    "it asks about DeepSpeed's own writer of checkpoints",
    "Use `engine.save_checkpoint`, which needs no settings",
)
_SPARSE = Refusal(
    "XLA has no sparse gradients; embeddings have dense ones",
    "Leave `sparse_gradients` out",
)
_OFFLOAD_STATES = Refusal(
    "states live on the devices and are donated to each step's program",
    "Use a higher ZeRO stage or more devices to hold less on each",
)
_ENGINE_DATA = Refusal(
    "curriculum learning, data sampling and random-LTD are not part of ZeRO-1/2",
    "Order the data in your own dataset or sampler",
)
_ELASTICITY = Refusal(
    "DeepSpeed removed elastic training in 0.19.8",
    "Load a checkpoint on another number of devices: every checkpoint of spmdzero can be",
)
_AUTOTUNING = Refusal("spmdzero has no autotuner", "Set the batch sizes in the config")


def _under(prefix: str, names: str, refusal: Refusal) -> dict[str, Refusal]:
    return {f"{prefix}.{name}".lstrip("."): refusal for name in names.split()}


# Path below `deepspeed` -> refusal.
REFUSALS: dict[str, Refusal] = {
    **_under("", "init_inference default_inference_config InferenceEngine", _INFERENCE),
    **_under("", "DeepSpeedInferenceConfig DeepSpeedHybridEngine", _INFERENCE),
    **_under("", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig", _INFERENCE),
    **_under("", "replace_transformer_layer inference", _INFERENCE),
    **_under("", "tp_model_init set_autotp_mode merge_tp_model_init_into_config", _PARALLEL),
    **_under("", "record_tp_model_init_args PipelineModule PipelineEngine pipe moe", _PARALLEL),
    **_under("", "DualPipeVModule DualPipeVEngine linear", _PARALLEL),
    **_under("", "resolve_per_head_muon_after_sharding set_optimizer_flags", _BUFFERS),
    **_under("", "compile", _COMPILE),
    **_under("", "autotuning", _AUTOTUNING),
    **_under("", "module_inject model_implementations", _INFERENCE),
    **_under("", "sequence compression nvme", _TUNING),
    **_under("", "elasticity", _ELASTICITY),
    **_under("ops", "op_builder csrc compile triton_ops", _BUILD),
    **_under("ops", "transformer quantizer fp_quantizer deepspeed4science", _INFERENCE),
    **_under("ops", "aio gds pin_memory", _HOST),
    **_under("ops", "random_ltd", _ENGINE_DATA),
    **_under("runtime", "pipe domino sequence_parallel tensor_parallel", _PARALLEL),
    **_under("runtime", "swap_tensor superoffload zenflow", _HOST),
    **_under("runtime", "hybrid_engine hybrid_engine_graph rollout", _INFERENCE),
    **_under("runtime", "data_pipeline", _ENGINE_DATA),
    **_under("runtime", "fp16 bf16_optimizer comm sparse_tensor weight_quantizer", _BUFFERS),
    **_under("runtime", "compiler", _COMPILE),
    **_under("runtime", "checkpoint_engine model_checkpointing state_dict_factory", _WRITERS),
    **_under("runtime.zero", "stage3 partitioned_param_coordinator parameter_offload", _STAGE_3),
    **_under("runtime.zero", "tiling linear mics", _STAGE_3),
    **_under("", "datastates io load_ds_config DeepSpeedDataLoader", _TUNING),
    **_under("accelerator", "is_current_accelerator_supported set_accelerator", _BUILD),
    **_under("comm", "reset_log has_comm_data get_comm_operation_count", _COMM_LOG),
    **_under("comm", "get_logged_comm_ops configure CommsLogger timers timed_op", _COMM_LOG),
    **_under("comm", "get_msg_size_from_args get_tensor_kwarg get_tensor_position", _COMM_LOG),
    **_under("comm", "get_debug_log_name get_default_args get_caller_func", _COMM_LOG),
    **_under("comm", "enable_symm_mem_for_group init_deepspeed_backend set_backend", _BACKENDS),
    **_under("comm", "initialize_mesh_device mpi_discovery in_aml in_aws_sm in_dlts", _BACKENDS),
    **_under("comm", "patch_aml_env_for_torch_nccl_backend CCLBackend", _BACKENDS),
    **_under("comm", "patch_aws_sm_env_for_torch_nccl_backend TorchBackend", _BACKENDS),
    **_under("comm", "ProcessGroup", _BACKENDS),
    **_under("zero", "DeepSpeedZeRoOffload TiledLinear TiledLinearReturnBias", _STAGE_3),
    **_under("zero", "estimate_zero3_model_states_mem_needs unwrap_model_for_generation", _STAGE_3),
    **_under("zero", "estimate_zero3_model_states_mem_needs_all_live", _STAGE_3),
    **_under("zero", "estimate_zero3_model_states_mem_needs_all_cold", _STAGE_3),
    **_under("utils", "safe_get_local_fp32_param safe_get_local_grad", _STAGE_3),
    **_under("utils", "safe_get_local_optimizer_state safe_set_local_optimizer_state", _STAGE_3),
    **_under("utils", "safe_set_local_fp32_param safe_set_local_grad", _STAGE_3),
    **_under("utils", "get_full_hp_grad get_full_hp_param set_full_hp_grad", _BUFFERS),
    **_under("utils", "set_full_hp_param get_hp_fragment_mapping link_hp_params", _BUFFERS),
    **_under("utils", "lazy_init_hp_params_optimizer_state map_to_flat_opt_states", _BUFFERS),
    **_under("utils", "fragment_address", _BUFFERS),
    **_under("utils", "get_numactl_cmd", _BUILD),
    **_under("utils", "get_caller_func", _COMM_LOG),
    **_under("utils", "initialize set_tensor_model_parallel_rank", _PARALLEL),
    **_under("utils", "set_tensor_model_parallel_world_size DeprecatedException", _PARALLEL),
    **_under("utils.groups", "initialize set_tensor_model_parallel_rank", _PARALLEL),
    **_under("utils.groups", "set_tensor_model_parallel_world_size", _PARALLEL),
    **_under("utils.groups", "DeprecatedException", _PARALLEL),
    **_under("checkpointing", "gather_partitioned_activations merge_tensors", _PARALLEL),
    **_under("checkpointing", "get_partition_size get_partition_start", _PARALLEL),
    **_under("checkpointing", "get_partitioned_activations_for_backward", _PARALLEL),
    **_under("checkpointing", "model_parallel_reconfigure_tp_seed", _PARALLEL),
    **_under("checkpointing", "CheckpointFunction Timers", _BUFFERS),
    **_under("checkpointing", "copy_to_device detach_variable extract_tensors", _HOST),
    **_under("checkpointing", "get_cpu_activations_for_backward move_to_device", _HOST),
    **_under("checkpointing", "get_offloaded_activations_for_backward", _HOST),
    **_under("checkpointing", "restore_offloaded_activations partition_activations", _HOST),
    **_under("checkpointing", "is_activation_to_checkpoint", _HOST),
    **_under("ops.adam", "DeepSpeedCPUAdam ZenFlowCPUAdam ZenFlowSelectiveAdamW", _HOST),
    **_under("ops.adam", "ZenFlowSelectiveAdamW_stage3", _HOST),
    **_under("ops.adagrad", "DeepSpeedCPUAdagrad", _HOST),
    **_under("ops.lion", "DeepSpeedCPULion", _HOST),
    **_under("runtime.dataloader", "DeepSpeedDataLoader DeepSpeedDataSampler", _TUNING),
    **_under("runtime.lr_schedules", "add_tuning_arguments parse_arguments", _ARGUMENTS),
    **_under("runtime.lr_schedules", "get_config_from_args get_lr_from_config", _ARGUMENTS),
    **_under("runtime.lr_schedules", "override_1cycle_params override_params", _ARGUMENTS),
    **_under("runtime.lr_schedules", "override_lr_range_test_params", _ARGUMENTS),
    **_under("runtime.lr_schedules", "override_warmupCosineLR_params", _ARGUMENTS),
    **_under("runtime.lr_schedules", "override_warmupLR_params", _ARGUMENTS),
    **_under("runtime.lr_schedules", "get_torch_optimizer update_lr", _BUFFERS),
    **_under("checkpoint.utils", "get_layer_ckpt_name_for_rank", _CHECKPOINT_FILES),
    **_under("checkpoint.utils", "get_model_ckpt_name_for_rank", _CHECKPOINT_FILES),
    **_under("checkpoint.utils", "get_zero_ckpt_name_for_rank", _CHECKPOINT_FILES),
    **_under("accelerator.DeepSpeedAccelerator", "Event Stream stream current_stream", _STREAMS),
    **_under("accelerator.DeepSpeedAccelerator", "default_stream create_graph", _STREAMS),
    **_under("accelerator.DeepSpeedAccelerator", "capture_to_graph replay_graph", _STREAMS),
    **_under("accelerator.DeepSpeedAccelerator", "is_current_stream_capturing", _STREAMS),
    **_under("accelerator.DeepSpeedAccelerator", "build_extension create_op_builder", _BUILD),
    **_under("accelerator.DeepSpeedAccelerator", "get_op_builder op_builder_dir", _BUILD),
    **_under("accelerator.DeepSpeedAccelerator", "set_compile_backend", _COMPILE),
    **_under("accelerator.DeepSpeedAccelerator", "get_compile_backend", _COMPILE),
    **_under("accelerator.DeepSpeedAccelerator", "pin_memory pin_empty pin_empty_like", _PINNED),
    **_under("accelerator.DeepSpeedAccelerator", "pin_memory_alignment unpin_memory", _PINNED),
    **_under("accelerator.DeepSpeedAccelerator", "register_host_memory", _PINNED),
    **_under("accelerator.DeepSpeedAccelerator", "unregister_host_memory", _PINNED),
    **_under("accelerator.DeepSpeedAccelerator", "set_visible_devices_envs", _BUILD),
    **_under("accelerator.DeepSpeedAccelerator", "visible_devices_envs", _BUILD),
    **_under("DeepSpeedEngine", "offload_states reload_states", _OFFLOAD_STATES),
    **_under("DeepSpeedEngine", "all_gather_scalar allreduce_and_copy", _BUFFERS),
    **_under("DeepSpeedEngine", "allreduce_bucket allreduce_no_retain", _BUFFERS),
    **_under("DeepSpeedEngine", "buffered_allreduce_fallback", _BUFFERS),
    **_under("DeepSpeedEngine", "get_optimizer_configuration", _BUFFERS),
    **_under("DeepSpeedEngine", "sparse_all_gather sparse_allreduce", _SPARSE),
    **_under("DeepSpeedEngine", "sparse_allreduce_bucket sparse_allreduce_no_retain", _SPARSE),
    **_under("DeepSpeedEngine", "compile_autosp compile_autotp get_autosp_backend", _COMPILE),
    **_under("DeepSpeedEngine", "get_autotp_backend get_deepcompile_backend", _COMPILE),
    **_under("DeepSpeedEngine", "get_deepspeed_compile_backend", _COMPILE),
    **_under("DeepSpeedEngine", "checkpoint_serialization_enabled", _WRITERS),
    **_under("DeepSpeedEngine", "checkpoint_writer_enabled", _WRITERS),
    **_under("DeepSpeedEngine", "autotuning_metric autotuning_metric_path", _AUTOTUNING),
    **_under("DeepSpeedEngine", "autotuning_model_info_path", _AUTOTUNING),
    **_under("DeepSpeedEngine", "autotuning_profile_model_info", _AUTOTUNING),
    **_under("DeepSpeedEngine", "curriculum_learning_config", _ENGINE_DATA),
    **_under("DeepSpeedEngine", "data_efficiency_config data_sampling_config", _ENGINE_DATA),
    **_under("DeepSpeedEngine", "random_ltd_config", _ENGINE_DATA),
    **_under("DeepSpeedEngine", "aio_config cpuadam_cores_perc zenflow_config", _HOST),
    **_under("DeepSpeedEngine", "swap_tensor_config zero_partial_offload", _HOST),
    **_under("DeepSpeedEngine", "tensor_parallel_config print_forward_breakdown", _PARALLEL),
    **_under("DeepSpeedEngine", "register_compile_pass get_compile_time", _COMPILE),
    **_under("DeepSpeedEngine", "compile_zero_optimization_stage", _COMPILE),
    **_under("DeepSpeedEngine", "uses_parallelization_pass_only", _COMPILE),
    **_under("DeepSpeedEngine", "autotuning_end_profile_step", _AUTOTUNING),
    **_under("DeepSpeedEngine", "autotuning_start_profile_step", _AUTOTUNING),
    **_under("DeepSpeedEngine", "load_moe_state_dict", _PARALLEL),
    **_under("DeepSpeedEngine", "random_ltd_initialize", _ENGINE_DATA),
    **_under("DeepSpeedEngine", "set_custom_curriculum_learning_schedule", _ENGINE_DATA),
    **_under("DeepSpeedEngine", "set_data_post_process_func", _ENGINE_DATA),
}


def refuse(path: str) -> NoReturn:
    """Raises SpmdZeroUsageError for a name of the table."""
    raise SpmdZeroUsageError(f"deepspeed.{path}: {why_refused(path)}")


def why_refused(path: str) -> str:
    """The reason for refusing a name of the table, and what to do in its place."""
    return f"{REFUSALS[path].reason}. {REFUSALS[path].instead}"


class _Refused(type):
    """The class of what a refused name is: it has none of the names that DeepSpeed's has."""

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RefusedNameError(
            f"deepspeed.{cls.__qualname__}.{name}: {why_refused(cls.__qualname__)}"
        )


def attribute(package: str, name: str) -> Any:
    """What `spmdzero.<package>.<name>` is where the package itself doesn't say.

    A module of the package, which nobody has imported before: DeepSpeed imports its own, and
    scripts write `deepspeed.runtime.lr_schedules.WarmupLR`. Or for a name that is refused a class
    that raises when it is called; a class, so that `isinstance` and `issubclass` go on working.

    Raises:
        AttributeError: neither.
    """
    path = f"{package}.{name}".lstrip(".")
    if path in REFUSALS:

        def new(*_: Any, **__: Any) -> NoReturn:
            refuse(path)

        return _Refused(
            name, (), {"__new__": new, "__doc__": why_refused(path), "__qualname__": path}
        )
    if not name.startswith("_") and _is_module(f"spmdzero.{path}"):
        return importlib.import_module(f"spmdzero.{path}")
    module = f"spmdzero.{package}".rstrip(".")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        # Its parent is a module without any.
        return False


def refused_methods(path: str) -> type:
    """A base class with a method that raises for each name of the table below `path`."""

    def method(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> NoReturn:
            refuse(f"{path}.{name}")

        refused.__name__ = name
        refused.__doc__ = f"Refused: {REFUSALS[f'{path}.{name}'].reason}."
        return refused

    names = [key.removeprefix(f"{path}.") for key in REFUSALS if key.startswith(f"{path}.")]
    return type(f"Refused{path.rsplit('.', 1)[-1]}", (), {name: method(name) for name in names})
