"""DeepSpeed's refused names, each with the reason and what to use instead."""

import dataclasses

from spmdzero._names import dotted


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The refusal of a name.

    Attributes:
        reason: why the name can't be honoured.
        instead: what to use instead.
    """

    reason: str
    instead: str


# Reason, alternative, and the names below `deepspeed` that are refused, as `dotted` reads them.
_TABLE: tuple[tuple[str, str, str], ...] = (
    (
        "spmdzero trains; it has no inference engine and no kernels to inject",
        "Call `engine.eval()` and `engine(...)`, or load the saved weights into the plain module",
        """
        init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig
          DeepSpeedHybridEngine DeepSpeedTransformerLayer DeepSpeedTransformerConfig
          replace_transformer_layer inference module_inject model_implementations
        ops: transformer quantizer fp_quantizer deepspeed4science
        runtime: hybrid_engine hybrid_engine_graph rollout
        """,
    ),
    (
        "weights are split over the mesh axis tensor when the engine is made, by the config",
        'Write "tensor_parallel": {"autotp_size": 2} in the config, and leave the call out',
        """
        merge_tp_model_init_into_config record_tp_model_init_args
        runtime: tensor_parallel
        DeepSpeedEngine: tensor_parallel_config
        """,
    ),
    (
        "the compiler divides rows along the mesh axis sequence, and exchanges heads for positions",
        "Call attention, layers and losses as for whole rows; docs/sequence_axis.md",
        """
        sequence: auto_sp autosp_detector autosp_fusion autosp_vit cross_entropy fpdt_layer
          linear_cross_entropy
        sequence.layer: single_all_to_all uneven_heads_all2all post_all2all pre_all2all_fun
        """,
    ),
    (
        "a step that is computed in pieces is the compiler's work, or the config's",
        'Write "spmd": {"fused_loss": true} for a loss without logits, "recompute": "everything" '
        "for activations",
        """
        runtime.sequence_parallel.ulysses_sp: sequence_tiled_compute SequenceTiledCompute TiledMLP
          TiledFusedLogitsLoss AutogradComputeMLP
        """,
    ),
    (
        "spmdzero is data-parallel ZeRO; a pipeline's layers run one after the other on every "
        "device, and there is no expert parallelism",
        "Train with `spmdzero.initialize`; stage 3 and the axis tensor split what doesn't fit",
        """
          DualPipeVModule DualPipeVEngine linear
        moe: ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch
          fused_expert_layout mappings
        runtime: domino
        runtime.pipe: p2p schedule
        utils: initialize set_tensor_model_parallel_rank set_tensor_model_parallel_world_size
          DeprecatedException
        utils.groups: initialize set_tensor_model_parallel_rank
          set_tensor_model_parallel_world_size DeprecatedException
        checkpointing: gather_partitioned_activations merge_tensors get_partition_size
          get_partition_start get_partitioned_activations_for_backward
          model_parallel_reconfigure_tp_seed
        DeepSpeedEngine: print_forward_breakdown load_moe_state_dict
        """,
    ),
    (
        "it belongs to DeepSpeed's flat buffers and buckets; here the compiler places collectives",
        "Read tensors by `spmdzero.utils.safe_get_full_fp32_param` and its siblings, and "
        "collectives by `spmdzero.record_ledgers(engine)`",
        """
        resolve_per_head_muon_after_sharding set_optimizer_flags
        runtime: fp16 bf16_optimizer comm sparse_tensor weight_quantizer
        utils: get_full_hp_grad get_full_hp_param set_full_hp_grad set_full_hp_param
          get_hp_fragment_mapping link_hp_params lazy_init_hp_params_optimizer_state
          map_to_flat_opt_states fragment_address  checkpointing: CheckpointFunction Timers
        runtime.lr_schedules: get_torch_optimizer update_lr
        DeepSpeedEngine: all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain
          buffered_allreduce_fallback get_optimizer_configuration
        """,
    ),
    (
        "the step is compiled by XLA already, forward, backward and update together",
        "Leave the call out",
        """
        compile  runtime: compiler
        accelerator.DeepSpeedAccelerator: set_compile_backend get_compile_backend
        DeepSpeedEngine: compile_autosp compile_autotp get_autosp_backend get_autotp_backend
          get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass
          get_compile_time compile_zero_optimization_stage uses_parallelization_pass_only
        """,
    ),
    (
        "spmdzero has no autotuner",
        "Set the batch sizes in the config",
        """
        autotuning
        DeepSpeedEngine: autotuning_metric autotuning_metric_path autotuning_model_info_path
          autotuning_profile_model_info autotuning_end_profile_step autotuning_start_profile_step
        """,
    ),
    (
        "it belongs to a DeepSpeed feature that is neither ZeRO-1/2 nor refused by its config key",
        "Leave the feature out of the config",
        """
        nvme datastates io load_ds_config DeepSpeedDataLoader
        runtime.dataloader: DeepSpeedDataLoader DeepSpeedDataSampler
        """,
    ),
    (
        "DeepSpeed removed elastic training in 0.19.8",
        "Start by `spmdzero launch --restarts 3 --elastic`, which goes on with fewer hosts: every "
        "checkpoint of spmdzero can be loaded on another number of devices",
        """
        elasticity
        """,
    ),
    (
        "nothing is compiled from C++ or Triton; XLA makes the kernels",
        "Leave it out",
        """
        ops: op_builder csrc compile triton_ops
        accelerator: is_current_accelerator_supported set_accelerator  utils: get_numactl_cmd
        accelerator.DeepSpeedAccelerator: build_extension create_op_builder get_op_builder
          op_builder_dir set_visible_devices_envs visible_devices_envs
        """,
    ),
    (
        "optimizers run on the devices, inside the compiled step; no processor of the host does",
        'Write "optimizer": {"type": "AdamW", ...} (or Adagrad, Lion) into the config; '
        '"offload_optimizer": {"device": "cpu"} has its states rest on the host',
        """
        runtime: superoffload zenflow
        checkpointing: copy_to_device detach_variable extract_tensors
          get_cpu_activations_for_backward move_to_device get_offloaded_activations_for_backward
          restore_offloaded_activations partition_activations is_activation_to_checkpoint
        ops.adam: ZenFlowCPUAdam ZenFlowSelectiveAdamW
          ZenFlowSelectiveAdamW_stage3  ops.adagrad: DeepSpeedCPUAdagrad
        DeepSpeedEngine: cpuadam_cores_perc zenflow_config zero_partial_offload
        """,
    ),
    (
        "a host's disks are read and written by no step: NVMe offload and its asynchronous files "
        "are DeepSpeed's alone",
        '"offload_optimizer": {"device": "cpu"} has states rest in the host\'s memory; read and '
        "write your own files with Python",
        """
        ops: aio gds pin_memory  runtime: swap_tensor
        DeepSpeedEngine: aio_config swap_tensor_config
        """,
    ),
    (
        "curriculum learning, data sampling and random-LTD are not part of ZeRO-1/2",
        "Order the data in your own dataset or sampler",
        """
        ops: random_ltd  runtime: data_pipeline
        DeepSpeedEngine: curriculum_learning_config data_efficiency_config data_sampling_config
          random_ltd_config random_ltd_initialize set_custom_curriculum_learning_schedule
          set_data_post_process_func
        """,
    ),
    (
        "it asks about DeepSpeed's own writer of checkpoints",
        "Use `engine.save_checkpoint`, which needs no settings",
        """
        runtime: checkpoint_engine model_checkpointing state_dict_factory
        DeepSpeedEngine: checkpoint_serialization_enabled checkpoint_writer_enabled
        """,
    ),
    (
        "DeepSpeed's stage 3 hooks modules; here the compiled step gathers a parameter where an "
        "operation uses it",
        'Write "zero_optimization": {"stage": 3}, and use modules and parameters directly: '
        "`spmdzero.zero.GatheredParameters` and `spmdzero.zero.Init` are here",
        """
        runtime.zero: stage3 partitioned_param_coordinator parameter_offload tiling linear mics
        zero: DeepSpeedZeRoOffload TiledLinear TiledLinearReturnBias
        runtime.zero.partition_parameters: zero_wrapper_for_fp_tensor_constructor
          _orig_torch_arange
        """,
    ),
    (
        "DeepSpeed's estimate of stage 3 is about its own buffers and what it offloads",
        "`spmdzero explain`, or `engine.explain`, says what a step needs at each stage",
        """
        zero: estimate_zero3_model_states_mem_needs
          estimate_zero3_model_states_mem_needs_all_live
          estimate_zero3_model_states_mem_needs_all_cold
        """,
    ),
    (
        "a process has several devices with a part on each, of which none is the local one",
        "`spmdzero.local_shards(tensor)` shows what each device holds of a parameter, and of "
        '`engine.named_tensors()["exp_avg/..."]`; `safe_get_full_...` and `safe_set_full_...` of '
        "`spmdzero.utils` read and set a tensor as a whole, and "
        "`safe_get_full_...(p, as_dtensor=True).to_local()` is what one host's devices hold",
        """
        utils: safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
          safe_set_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad
        """,
    ),
    (
        "collectives are part of the compiled step, no call of Python's starts one",
        "Read them from the program: `with spmdzero.record_ledgers(engine) as ledgers:`",
        """
        comm: reset_log has_comm_data get_comm_operation_count get_logged_comm_ops configure
          CommsLogger timers timed_op get_msg_size_from_args get_tensor_kwarg get_tensor_position
          get_debug_log_name get_default_args get_caller_func  utils: get_caller_func
        """,
    ),
    (
        "hosts are connected by gloo and devices by XLA; there is no other backend to set up",
        "Call `spmdzero.init_distributed()`",
        """
        comm: enable_symm_mem_for_group init_deepspeed_backend set_backend initialize_mesh_device
          mpi_discovery in_aml in_aws_sm in_dlts patch_aml_env_for_torch_nccl_backend CCLBackend
          patch_aws_sm_env_for_torch_nccl_backend TorchBackend ProcessGroup
        """,
    ),
    (
        "schedules are read from the config, not from command-line arguments",
        'Write "scheduler": {"type": ..., "params": {...}} into the config',
        """
        runtime.lr_schedules: add_tuning_arguments parse_arguments get_config_from_args
          get_lr_from_config override_1cycle_params override_params override_lr_range_test_params
          override_warmupCosineLR_params override_warmupLR_params
        """,
    ),
    (
        "it names the files of one rank; spmdzero has one process per host and no ranks of devices",
        "Use `engine.save_checkpoint` and `engine.load_checkpoint`",
        """
        checkpoint.utils: get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank
          get_zero_ckpt_name_for_rank
        """,
    ),
    (
        "XLA orders and overlaps the work of a compiled program by itself, and has no streams",
        "Leave it out; `get_accelerator().synchronize()` waits for the devices",
        """
        accelerator.DeepSpeedAccelerator: Event Stream stream current_stream default_stream
          create_graph capture_to_graph replay_graph is_current_stream_capturing
        """,
    ),
    (
        "XLA copies from ordinary host memory",
        "Leave it out; the loader prefetches to the devices",
        """
        accelerator.DeepSpeedAccelerator: pin_memory pin_empty pin_empty_like pin_memory_alignment
          unpin_memory register_host_memory unregister_host_memory
        """,
    ),
    (
        "states live on the devices and are donated to each step's program",
        "Use a higher ZeRO stage or more devices to hold less on each",
        """
        DeepSpeedEngine: offload_states reload_states
        """,
    ),
    (
        "XLA has no sparse gradients; embeddings have dense ones",
        "Leave `sparse_gradients` out",
        """
        DeepSpeedEngine: sparse_all_gather sparse_allreduce sparse_allreduce_bucket
          sparse_allreduce_no_retain
        """,
    ),
)


# Path below `deepspeed` -> refusal.
REFUSALS: dict[str, Refusal] = {
    path: Refusal(reason, instead) for reason, instead, names in _TABLE for path in dotted(names)
}
