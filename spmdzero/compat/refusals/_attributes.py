"""Refused attributes of DeepSpeed's engine and optimizer: why, and what to use instead."""

from spmdzero._names import dotted
from spmdzero.compat.refusals._table import Refusal

# Reason, alternative, and the attributes of the engine, and of the optimizer that `initialize`
# returns, as `dotted` reads them.
_ATTRIBUTES: tuple[tuple[str, str, str], ...] = (
    (
        "it belongs to DeepSpeed's flat buffers and buckets; here each parameter has states",
        "Read `engine.optimizer.param_groups` and `engine.optimizer.state[parameter]`, whole "
        "tensors by `spmdzero.utils.safe_get_full_fp32_param` and its siblings",
        """
        optimizer: bit16_groups bit16_groups_flat fp16_groups fp16_groups_flat fp32_groups
          fp32_groups_flat fp32_groups_flat_partition single_partition_of_fp32_groups
          fp32_partitioned_groups_flat fp16_partitioned_groups fp16_partitioned_groups_flat
          parallel_partitioned_bit16_groups params_in_partition params_not_in_partition
          averaged_gradients grads_in_partition partition_count partition_size groups_padding
          ipg_buckets setup_buckets get_bit16_param_group get_flat_partition
          get_data_parallel_partitions get_fp32_grad_partitions update_lp_params
        """,
    ),
    (
        "gradients are reduced, checked and unscaled inside the compiled step",
        "`engine.get_global_grad_norm()` and `engine.optimizer.overflow` tell afterwards, "
        "`parameter.grad` before",
        """
        optimizer: scaled_global_norm get_grad_norm_direct has_overflow has_overflow_serial
          check_overflow unscale_and_clip_grads reduce_gradients average_tensor loss_scale_config
          reduce_ipg_grads zero_reduced_gradients
        """,
    ),
    (
        "the engine runs backward and counts micro-batches, not its optimizer",
        "Call the engine's: `engine.backward(loss)`, `engine.scale(loss)`, "
        "`engine.is_gradient_accumulation_boundary()`, "
        "`engine.set_gradient_accumulation_boundary(...)`",
        """
        optimizer: backward scale_if_loss is_gradient_accumulation_boundary
          set_gradient_accumulation_boundary
        """,
    ),
    (
        "states live on the devices and are donated to each step's program",
        "Use a higher ZeRO stage or more devices to hold less on each",
        """
        optimizer: offload_states reload_states
        """,
    ),
    (
        "one process drives all devices of its host, and XLA's collectives know no process groups",
        "`engine.data_parallel_group` is all processes; `engine.dp_world_size` counts devices",
        """
        optimizer: dp_process_group real_dp_process_group
        """,
    ),
    (
        'there is a profiler only with `"flops_profiler": {"enabled": true}`',
        "Turn it on, or use `spmdzero.profiling.flops_profiler.FlopsProfiler(module, engine)`",
        """
        engine: flops_profiler
        """,
    ),
    (
        "the step is one compiled program, in which no timer of Python's ticks",
        'Write "wall_clock_breakdown": true, or use `spmdzero.profile`',
        """
        engine: timers engine_timers
        """,
    ),
    (
        "checkpoints are written by spmdzero itself",
        "Use `engine.save_checkpoint` and `engine.load_checkpoint`",
        """
        engine: checkpoint_engine
        """,
    ),
    (
        "parameters have no numbers here",
        "`{p: name for name, p in engine.module.named_parameters()}` names them",
        """
        engine: param_names
        """,
    ),
)

ATTRIBUTES: dict[str, Refusal] = {
    path: Refusal(reason, instead)
    for reason, instead, names in _ATTRIBUTES
    for path in dotted(names)
}
"""Attribute of the ``engine`` or of the ``optimizer`` -> its refusal."""
