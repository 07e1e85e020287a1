"""DeepSpeed's keys that have no effect under SPMD, and keys that DeepSpeed itself removed."""

from spmdzero._names import dotted

# Reason -> the keys with this reason, as `dotted` reads them.
_REASONS = {
    "the compiler lays activations out in memory": (
        "activation_checkpointing: contiguous_memory_optimization number_checkpoints"
    ),
    "it splits activations over model parallelism, which spmdzero doesn't do": (
        "activation_checkpointing: partition_activations"
    ),
    "recomputation is inside one compiled program": (
        "activation_checkpointing: profile synchronize_checkpoint_boundary"
    ),
    "it is about offloading to NVMe, which spmdzero doesn't do": """
        aio: block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds
        zero_optimization.offload_optimizer: buffer_count fast_init nvme_path pipeline_read
        pipeline_write zero_optimization.offload_param: buffer_count buffer_size max_in_cpu
        nvme_path
    """,
    "the devices update, whatever rests on the host, and no processor of the host does": """
        zero_force_ds_cpu_optimizer zero_optimization.offload_optimizer: cpuadam_cores_perc
        super_offload
    """,
    "all states rest on the host, or none, which moves no number": (
        "zero_optimization.offload_optimizer: ratio"
    ),
    "XLA compiles each step": """
        compile: autoep_non_moe debug_log deepcompile double_buffer free_activation
        free_activation_threshold keep_all_input_tensors keep_int_input_tensors offload_activation
        offload_activation_pin_memory offload_opt_states offload_parameters passes
        symmetric_memory sync_after_allgather sync_after_reduce sync_before_allgather
        sync_before_reduce
    """,
    "host memory that a program of the devices reads is always pinned": """
        zero_optimization: cpu_offload_use_pin_memory
        zero_optimization.offload_optimizer: pin_memory
        zero_optimization.offload_param: pin_memory
    """,
    "the compiler schedules each collective, there are no communication buckets": """
        allgather_size zero_optimization: allgather_bucket_size allgather_partitions
        reduce_bucket_size use_multi_rank_bucket_allreduce
    """,
    "a gradient always joins the accumulator during backward": "bf16: immediate_grad_update",
    "checkpoints have one format, which each host writes for its own devices": """
        checkpoint: checkpoint_serialization writer checkpoint.parallel_write:
        pipeline_stage
    """,
    "the compiler makes the collectives, no Python function calls them": "comms_logger: debug",
    "the compiler gathers the updated parameters, with no other way": "disable_allgather",
    "one process drives all devices, no rank waits for another's collection": "disable_python_gc",
    "what backward recomputes is counted in the program": "flops_profiler: recompute_fwd_factor",
    "the compiler fuses the update": "optimizer: legacy_fusion",
    "a PipelineModule has no stages here: every device runs all of its layers": "pipeline",
    "no timer of its own: wall_clock_breakdown times each step": (
        "timers.throughput: enabled synchronized"
    ),
    "each device computes its rows by all experts": "use_data_before_expert_parallelism",
    "the model's own code finds and computes its experts": """
        expert_parallel: async_split_plan combine_impl comm_backend comm_max_tokens_per_rank
        comm_num_sm comm_qp_margin disable_triton_grouped_mm expert_pattern expert_w1 expert_w2
        expert_w3 gate_up_impl has_shared_experts moe_layer_pattern num_experts_attr router_pattern
        row_weighting_impl shared_experts_gate_pattern shared_experts_pattern top_k_attr
        use_grouped_mm validate_folding_routing
    """,
    "DeepSpeed only checks its alignment for CUDA tensor cores": "vocabulary_size",
    "the compiler lays gradients out in memory": "zero_optimization: contiguous_gradients",
    "it steers DeepSpeed's own checkpoint files": (
        "zero_optimization: elastic_checkpoint pipeline_loading_checkpoint"
    ),
    "a tuning of DeepSpeed's stage 3, which hooks modules": """
        zero_optimization: enable_sanity_checks leaf_module log_trace_cache_warnings
        memory_efficient_linear override_module_apply save_muon_momentum_buffer_in_memory
        stage3_module_granularity_threshold sub_group_size
    """,
    "a parameter is gathered for each use and let go; the compiler says when it starts": """
        zero_optimization: stage3_allgather_sequential stage3_max_live_parameters
        stage3_max_reuse_distance stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params
    """,
    "a parameter without a gradient counts as one whose gradient is zero": (
        "zero_optimization: ignore_unused_parameters"
    ),
    "masters are always loaded in fp32": "zero_optimization: load_from_fp32_weights",
    "the compiler overlaps communication with computation by itself": (
        "zero_optimization: overlap_comm"
    ),
    "the sharding plan decides the padding": "zero_optimization: parameter_alignment",
    "it spreads copies of gradients to the host, of which none are": (
        "zero_optimization: round_robin_gradients"
    ),
    "weights' placements are annotations, and the compiler divides and overlaps what follows": """
        tensor_parallel: tp_overlap_comm vocab_parallel_ce_backend vocab_parallel_lm_head
    """,
    "the sections bf16 and fp16 choose the dtype": "tensor_parallel: dtype",
    "it belongs to DeepSpeed's inference": """
        tensor_parallel: injection_policy_tuple keep_module_on_host kernel_inject
        replace_with_kernel_inject tensor_parallel tp
    """,
    "a saved model is always whole: it is read from the shards": (
        "zero_optimization: stage3_gather_16bit_weights_on_model_save"
    ),
}

NO_MEANING: dict[str, str] = dict(
    sorted((key, reason) for reason, keys in _REASONS.items() for key in dotted(keys))
)
"""Key that is accepted and has no effect under SPMD -> the reason."""

_WITHIN_HALVES = (
    '"spmd": {"mesh": {"data": 2, "fsdp": -1}} shards parameters and states within halves of the '
    "devices, and gathers within them"
)
_MICS = f"DeepSpeed removed MiCS in 0.19.8; {_WITHIN_HALVES}"

REMOVED: dict[str, str] = {
    "amp": "DeepSpeed removed Apex AMP in 0.19.8",
    "compression_training": "DeepSpeed removed its compression library in 0.19.8",
    "curriculum_learning": "DeepSpeed removed the legacy curriculum learning in 0.19.8",
    "eigenvalue": "DeepSpeed removed the eigenvalue-based quantisation in 0.19.8",
    "elasticity": (
        "DeepSpeed removed elastic training in 0.19.8; write train_batch_size (its "
        "max_train_batch_size) and train_micro_batch_size_per_gpu (one of its micro_batch_sizes), "
        "and start by `spmdzero launch --restarts 3 --elastic`, which goes on with fewer hosts"
    ),
    "graph_harvesting": "DeepSpeed removed graph harvesting in 0.19.8",
    "nebula": "DeepSpeed removed Nebula checkpointing in 0.19.8",
    "progressive_layer_drop": "DeepSpeed removed progressive layer dropping in 0.19.8",
    "quantize_training": "DeepSpeed removed the mixture of quantisation in 0.19.8",
    "sparse_attention": "DeepSpeed removed sparse attention in 0.19.8",
    "sparse_gradients": "DeepSpeed removed compressed embedding gradients in 0.19.8",
    "zero_optimization.mics_hierarchical_params_gather": _MICS,
    "zero_optimization.mics_shard_size": _MICS,
    "zero_optimization.zeropp_loco_param": "DeepSpeed removed LoCo-ZeRO++ in 0.19.8",
}
"""Key that DeepSpeed 0.19.8 refuses -> DeepSpeed's reason; accepted while it is off."""
