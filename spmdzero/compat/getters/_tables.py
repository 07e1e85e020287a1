"""Tables of getters that read one key of the config, and of getters with a fixed value."""

from typing import Any

# Getters of one key each: prefix of the key's path, prefix of the getter's name, and the common
# rest of both, or the name's rest = the path's rest.
KEYS = (
    (
        "",
        "",
        """steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level
        managed_gradient_accumulation dataloader_drop_last gradient_predivide_factor
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
    ),
    ("bf16.", "bfloat16_", "enabled"),
    (
        "bf16.bf16_",
        "bf16_",
        "optimizer_states master_weights_and_gradients=master_weights_and_grads",
    ),
    ("checkpoint.", "", "use_node_local_storage load_universal_checkpoint=load_universal"),
    ("compile.", "is_", "deepcompile_enabled=deepcompile"),
    ("tensor_parallel.", "", "autotp_size"),
    (
        "flops_profiler.",
        "flops_profiler_",
        """enabled recompute_fwd_factor profile_step module_depth top_modules detailed
        output_file""",
    ),
    (
        "fp16.",
        "fp16_",
        "enabled auto_cast master_weights_and_gradients=fp16_master_weights_and_grads",
    ),
    ("fp16.", "", "loss_scale"),
    ("torch_autocast.", "torch_autocast_", "enabled"),
    (
        "zero_optimization.",
        "zero_",
        """offload_optimizer offload_param reduce_scatter contiguous_gradients
        allgather_partitions round_robin_gradients
        multi_rank_bucket_allreduce=use_multi_rank_bucket_allreduce reduce_bucket_size
        allgather_bucket_size sub_group_size log_trace_cache_warnings""",
    ),
    ("zero_optimization.zero_", "zero_", "hpz_partition_size"),
    (
        "zero_optimization.stage3_",
        "zero_",
        """prefetch_bucket_size param_persistence_threshold model_persistence_threshold
        max_live_parameters max_reuse_distance module_granularity_threshold
        allgather_sequential""",
    ),
)
_ONE_PARALLELISM = "one process drives all devices, whatever axes their mesh has"
# Getters with a fixed value: the value, the reason, and the names.
FIXED: tuple[tuple[Any, str, str], ...] = (
    (False, "autotuning is refused", "autotuning_enabled"),
    (False, "curriculum learning is refused", "curriculum_learning_enabled"),
    (False, "data efficiency is refused", "data_efficiency_enabled data_sampling_enabled"),
    (False, "random layer token drop is refused", "random_ltd_enabled"),
    (False, "XLA fuses the update", "optimizer_legacy_fusion"),
    (False, "XLA is the compiler", "is_deepcompile_active"),
    (
        False,
        "a gathered parameter is let go, and no group is told apart as the first",
        """is_first_weights_partition_group
        zero_save_muon_momentum_buffer_in_memory""",
    ),
    (False, "the collective ledger shows what was compiled", "is_sanity_checks_enabled"),
    (False, "nothing is kept on a disk", "zero_nvme_offload_optimizer"),
    (False, "the devices update, and no processor of the host does", "super_offload"),
    (
        False,
        "that is ZeRO++",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
    ),
    (False, "DeepSpeed removed it", "zero_legacy_stage1"),
    (False, "a checkpoint format that DeepSpeed no longer writes", "zero_elastic_checkpoint"),
    (False, "shards follow the plan, not a flat buffer", "zero_parameter_alignment"),
    (True, "the norm is part of every step's program", "zero_compute_grad_norm"),
    (True, "a missing gradient counts as one that is zero", "zero_ignore_unused_parameters"),
    (True, "not the parameters rounded from masters are trained on", "zero_load_from_fp32_weights"),
    (0, _ONE_PARALLELISM, "get_model_parallel_rank"),
    (0, _ONE_PARALLELISM, "get_tensor_parallel_rank"),
)
