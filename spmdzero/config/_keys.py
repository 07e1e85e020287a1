"""DeepSpeed's keys that change nothing under SPMD, and those that DeepSpeed itself removed."""

_BUCKETS = "the compiler schedules each collective, there are no communication buckets"
_OVERLAP = "the compiler overlaps communication with computation by itself"
_LAYOUT = "the compiler lays activations out in memory"
_STAGE_3 = "a tuning of stage 3; at stages 0 to 2 parameters stay replicated"
_SAVED_WHOLE = "parameters stay replicated, so a saved model is whole without a gather"

_ONE_FORMAT = "checkpoints have one format, which each host writes for its own devices"
_OLD_CHECKPOINT = "it steers DeepSpeed's own checkpoint files"
_NO_OFFLOAD = "it concerns offloading, which spmdzero doesn't do"
_NO_TIMER = "no timer of its own: wall_clock_breakdown times each step"

NO_MEANING: dict[str, str] = {
    "activation_checkpointing.contiguous_memory_optimization": _LAYOUT,
    "activation_checkpointing.number_checkpoints": _LAYOUT,
    "activation_checkpointing.partition_activations": (
        "it splits activations over model parallelism, which spmdzero doesn't do"
    ),
    "activation_checkpointing.profile": "recomputation is inside one compiled program",
    "activation_checkpointing.synchronize_checkpoint_boundary": (
        "recomputation is inside one compiled program"
    ),
    "aio.block_size": _NO_OFFLOAD,
    "aio.intra_op_parallelism": _NO_OFFLOAD,
    "aio.overlap_events": _NO_OFFLOAD,
    "aio.queue_depth": _NO_OFFLOAD,
    "aio.single_submit": _NO_OFFLOAD,
    "aio.use_gds": _NO_OFFLOAD,
    "allgather_size": _BUCKETS,
    "bf16.immediate_grad_update": "a gradient always joins the accumulator during backward",
    "checkpoint.checkpoint_serialization": _ONE_FORMAT,
    "checkpoint.parallel_write.pipeline_stage": _ONE_FORMAT,
    "checkpoint.writer": _ONE_FORMAT,
    "comms_logger.debug": "the compiler makes the collectives, no Python function calls them",
    "disable_allgather": "the compiler gathers the updated parameters, with no other way",
    "disable_python_gc": "one process drives all devices, no rank waits for another's collection",
    "flops_profiler.recompute_fwd_factor": "what backward recomputes is counted in the program",
    "optimizer.legacy_fusion": "the compiler fuses the update",
    "pipeline": "DeepSpeed reads it for a PipelineModule, which spmdzero doesn't train",
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
    "timers.throughput.enabled": _NO_TIMER,
    "timers.throughput.synchronized": _NO_TIMER,
    "use_data_before_expert_parallelism": "there is no expert parallelism",
    "vocabulary_size": "DeepSpeed only checks its alignment for CUDA tensor cores",
    "zero_force_ds_cpu_optimizer": _NO_OFFLOAD,
    "zero_optimization.allgather_bucket_size": _BUCKETS,
    "zero_optimization.allgather_partitions": _BUCKETS,
    "zero_optimization.contiguous_gradients": "the compiler lays gradients out in memory",
    "zero_optimization.cpu_offload_use_pin_memory": _NO_OFFLOAD,
    "zero_optimization.elastic_checkpoint": _OLD_CHECKPOINT,
    "zero_optimization.enable_sanity_checks": _STAGE_3,
    "zero_optimization.ignore_unused_parameters": "DeepSpeed reads it only while it offloads",
    "zero_optimization.leaf_module": _STAGE_3,
    "zero_optimization.load_from_fp32_weights": "masters are always loaded in fp32",
    "zero_optimization.log_trace_cache_warnings": _STAGE_3,
    "zero_optimization.memory_efficient_linear": _STAGE_3,
    "zero_optimization.overlap_comm": _OVERLAP,
    "zero_optimization.override_module_apply": _STAGE_3,
    "zero_optimization.parameter_alignment": "the sharding plan decides the padding",
    "zero_optimization.pipeline_loading_checkpoint": _OLD_CHECKPOINT,
    "zero_optimization.reduce_bucket_size": _BUCKETS,
    "zero_optimization.reduce_scatter": (
        "the sharding plan decides which collective reduces; false only permits prescaling at "
        "stage 2"
    ),
    "zero_optimization.round_robin_gradients": "it spreads copies to the host, of which none are",
    "zero_optimization.save_muon_momentum_buffer_in_memory": _STAGE_3,
    "zero_optimization.stage3_allgather_sequential": _STAGE_3,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _SAVED_WHOLE,
    "zero_optimization.stage3_max_live_parameters": _STAGE_3,
    "zero_optimization.stage3_max_reuse_distance": _STAGE_3,
    "zero_optimization.stage3_model_persistence_threshold": _STAGE_3,
    "zero_optimization.stage3_module_granularity_threshold": _STAGE_3,
    "zero_optimization.stage3_param_persistence_threshold": _STAGE_3,
    "zero_optimization.stage3_prefetch_bucket_size": _STAGE_3,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _STAGE_3,
    "zero_optimization.sub_group_size": _STAGE_3,
    "zero_optimization.use_multi_rank_bucket_allreduce": _BUCKETS,
}
"""Keys that are accepted and change nothing under SPMD, with the reason for each."""

_REMOVED_ELASTICITY = (
    "DeepSpeed removed elastic training in 0.19.8; set train_batch_size, "
    "train_micro_batch_size_per_gpu and gradient_accumulation_steps directly"
)

REMOVED: dict[str, str] = {
    "amp": "DeepSpeed removed Apex AMP in 0.19.8",
    "compression_training": "DeepSpeed removed its compression library in 0.19.8",
    "curriculum_learning": "DeepSpeed removed the legacy curriculum learning in 0.19.8",
    "eigenvalue": "DeepSpeed removed the eigenvalue-based quantisation in 0.19.8",
    "elasticity": _REMOVED_ELASTICITY,
    "graph_harvesting": "DeepSpeed removed graph harvesting in 0.19.8",
    "nebula": "DeepSpeed removed Nebula checkpointing in 0.19.8",
    "progressive_layer_drop": "DeepSpeed removed progressive layer dropping in 0.19.8",
    "quantize_training": "DeepSpeed removed the mixture of quantisation in 0.19.8",
    "sparse_attention": "DeepSpeed removed sparse attention in 0.19.8",
    "sparse_gradients": "DeepSpeed removed compressed embedding gradients in 0.19.8",
    "zero_optimization.mics_hierarchical_params_gather": "DeepSpeed removed MiCS in 0.19.8",
    "zero_optimization.mics_shard_size": "DeepSpeed removed MiCS in 0.19.8",
    "zero_optimization.zeropp_loco_param": "DeepSpeed removed LoCo-ZeRO++ in 0.19.8",
}
"""Keys that DeepSpeed 0.19.8 refuses, with its reason; accepted while they are off."""
