"""DeepSpeedEngine's getters of the section ``zero_optimization`` and what stands around it.

Names, return types and "off" values are DeepSpeed's (runtime/engine.py). A value that has no
meaning under SPMD, such as a bucket size, is returned as the config holds it.
"""

from spmdzero.config import SpmdZeroConfig, ZeroConfig


class ZeroSettings:
    """What the config says about ZeRO, by DeepSpeed's method names."""

    spmd_config: SpmdZeroConfig

    @property
    def _zero(self) -> ZeroConfig:
        return self.spmd_config.zero_optimization

    def zero_optimization(self) -> bool:
        """Whether the stage is 1 or 2."""
        return self._zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are shards between micro-batches: stage 2."""
        return self._zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """False: that is stage 3."""
        return False

    def is_first_weights_partition_group(self) -> bool:
        """False: that is stage 3."""
        return False

    def zero_allow_untested_optimizer(self) -> bool:
        """Whether an optimizer that DeepSpeed did not test with ZeRO may be used."""
        return self.spmd_config.zero_allow_untested_optimizer

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """As the config holds it; without meaning, nothing is offloaded."""
        return self.spmd_config.zero_force_ds_cpu_optimizer

    # -- communication: the compiler decides, these are the config's values --------------------

    def zero_reduce_scatter(self) -> bool:
        """The config's `reduce_scatter`."""
        return self._zero.reduce_scatter

    def zero_overlap_comm(self) -> bool:
        """The config's `overlap_comm`; DeepSpeed turns it on by itself in stage 3 only."""
        return bool(self._zero.overlap_comm)

    def zero_contiguous_gradients(self) -> bool:
        """The config's `contiguous_gradients`."""
        return self._zero.contiguous_gradients

    def zero_allgather_partitions(self) -> bool:
        """The config's `allgather_partitions`."""
        return self._zero.allgather_partitions

    def zero_round_robin_gradients(self) -> bool:
        """The config's `round_robin_gradients`."""
        return self._zero.round_robin_gradients

    def zero_multi_rank_bucket_allreduce(self) -> bool:
        """The config's `use_multi_rank_bucket_allreduce`."""
        return self._zero.use_multi_rank_bucket_allreduce

    def zero_reduce_bucket_size(self) -> int:
        """The config's `reduce_bucket_size`, in elements."""
        return self._zero.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int:
        """The config's `allgather_bucket_size`, in elements."""
        return self._zero.allgather_bucket_size

    def zero_sub_group_size(self) -> int:
        """The config's `sub_group_size`, in elements."""
        return self._zero.sub_group_size

    # -- stage 3's own: the config's values, without effect below it ---------------------------

    def zero_prefetch_bucket_size(self) -> int:
        """The config's `stage3_prefetch_bucket_size`, in elements."""
        return self._zero.stage3_prefetch_bucket_size

    def zero_param_persistence_threshold(self) -> int:
        """The config's `stage3_param_persistence_threshold`, in elements."""
        return self._zero.stage3_param_persistence_threshold

    def zero_model_persistence_threshold(self) -> int:
        """The config's `stage3_model_persistence_threshold`, in elements."""
        return self._zero.stage3_model_persistence_threshold

    def zero_max_live_parameters(self) -> int:
        """The config's `stage3_max_live_parameters`."""
        return self._zero.stage3_max_live_parameters

    def zero_max_reuse_distance(self) -> int:
        """The config's `stage3_max_reuse_distance`."""
        return self._zero.stage3_max_reuse_distance

    def zero_module_granularity_threshold(self) -> int:
        """The config's `stage3_module_granularity_threshold`."""
        return self._zero.stage3_module_granularity_threshold

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """The config's `stage3_gather_16bit_weights_on_model_save`."""
        return self._zero.stage3_gather_16bit_weights_on_model_save

    def zero_allgather_sequential(self) -> bool:
        """The config's `stage3_allgather_sequential`."""
        return self._zero.stage3_allgather_sequential

    def zero_log_trace_cache_warnings(self) -> bool:
        """The config's `log_trace_cache_warnings`."""
        return self._zero.log_trace_cache_warnings

    # -- refused by the config, so always off --------------------------------------------------

    def zero_offload_optimizer(self) -> None:
        """None: optimizer states stay on the devices."""

    def zero_offload_param(self) -> None:
        """None: parameters stay on the devices."""

    def zero_use_cpu_optimizer(self) -> bool:
        """False: the update runs on the devices."""
        return False

    def zero_cpu_offload(self) -> bool:
        """False: optimizer states stay on the devices."""
        return False

    def zero_nvme_offload_optimizer(self) -> bool:
        """False: optimizer states stay on the devices."""
        return False

    def super_offload(self) -> bool:
        """False: optimizer states stay on the devices."""
        return False

    def zero_hpz_partition_size(self) -> int:
        """1: no secondary partition, that is ZeRO++."""
        return 1

    def zero_quantized_weights(self) -> bool:
        """False: that is ZeRO++."""
        return False

    def zero_quantized_nontrainable_weights(self) -> bool:
        """False: that is ZeRO++."""
        return False

    def zero_quantized_gradients(self) -> bool:
        """False: that is ZeRO++."""
        return False

    def zero_legacy_stage1(self) -> bool:
        """False: DeepSpeed removed it."""
        return False

    def zero_elastic_checkpoint(self) -> bool:
        """False: a checkpoint format that DeepSpeed no longer writes."""
        return False

    def zero_parameter_alignment(self) -> bool:
        """False: shards follow the plan, not a flat buffer."""
        return False

    def zero_save_muon_momentum_buffer_in_memory(self) -> bool:
        """False: that is stage 3."""
        return False

    def is_sanity_checks_enabled(self) -> bool:
        """False: that is stage 3; the collective ledger shows what was compiled."""
        return False

    # -- fixed by how spmdzero works -----------------------------------------------------------

    def zero_compute_grad_norm(self) -> bool:
        """True: the norm is part of every step's program."""
        return True

    def zero_ignore_unused_parameters(self) -> bool:
        """True: a parameter without a gradient counts as one whose gradient is zero."""
        return True

    def zero_load_from_fp32_weights(self) -> bool:
        """True: master weights, not the parameters rounded from them, are what is trained on."""
        return True
