"""Refuses combinations of keys that are each valid alone."""

from spmdzero.config._models import SpmdZeroConfig
from spmdzero.errors import SpmdZeroConfigError


def check_combinations(config: SpmdZeroConfig) -> None:
    """Returns if the sections are compatible.

    Raises:
        SpmdZeroConfigError: two keys contradict each other, as in DeepSpeed's runtime/config.py
            (``_do_error_check``), runtime/engine.py and zero/stage_1_and_2.py; or the stage is 3,
            and parameters would have to be whole.
    """
    _one_precision(config)
    _autocast_dtype(config)
    _parameter_dtype(config)
    _low_masters_need_zero(config)
    _scaling_before_reduction(config)
    _stage_3(config)
    _shared_replicas(config)
    _parallel_passes(config)
    _experts_of_their_own(config)


def _one_precision(config: SpmdZeroConfig) -> None:
    if config.bf16.enabled and config.fp16.enabled:
        raise SpmdZeroConfigError(
            key="fp16.enabled",
            value=True,
            reason="bf16 is enabled too",
            fix="Enable one of the two; bf16 needs no loss scale.",
        )
    if config.torch_autocast.enabled and config.fp16.enabled:
        raise SpmdZeroConfigError(
            key="torch_autocast.enabled",
            value=True,
            reason="autocast computes in bf16, and fp16 is enabled too",
            fix="Turn off torch_autocast or fp16, or enable bf16 beside torch_autocast.",
        )


def _autocast_dtype(config: SpmdZeroConfig) -> None:
    reasons = {
        "fp16": "XLA's autocast computes in bf16 only, and fp16 would need the loss scale that "
        "DeepSpeed's torch.amp.GradScaler adds",
        "fp32": "XLA's autocast computes in bf16 only; fp32 would leave it off",
    }
    asked = config.torch_autocast.dtype
    if config.torch_autocast.enabled and asked in reasons:
        raise SpmdZeroConfigError(
            key="torch_autocast.dtype",
            value=asked,
            reason=reasons[asked],
            fix='Write "bfloat16", which needs no loss scale, or turn torch_autocast off.',
        )


def _parameter_dtype(config: SpmdZeroConfig) -> None:
    asked = config.data_types.param_dtype
    chosen = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    if asked not in (None, chosen):
        raise SpmdZeroConfigError(
            key="data_types.param_dtype",
            value=asked,
            reason=f"the bf16 and fp16 sections choose {chosen}",
            fix="Remove the key, or enable the section that chooses this dtype.",
        )


def _low_masters_need_zero(config: SpmdZeroConfig) -> None:
    if config.bf16.bf16_master_weights_and_grads and not config.zero_optimization.stage:
        raise SpmdZeroConfigError(
            key="bf16.bf16_master_weights_and_grads",
            value=True,
            reason="master weights belong to ZeRO, and the stage is 0",
            fix='Write "zero_optimization": {"stage": 1} or 2, or false here.',
        )


def _scaling_before_reduction(config: SpmdZeroConfig) -> None:
    zero = config.zero_optimization
    if zero.stage < 2 or not zero.reduce_scatter or config.gradient_allreduce_op == "sum":
        return
    fix = 'Keep the default, or write "reduce_scatter": false in zero_optimization, or use stage 1.'
    for key, off in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        value = getattr(config, key)
        if value != off:
            raise SpmdZeroConfigError(
                key=key,
                value=value,
                reason="DeepSpeed refuses it at stage 2 while reduce_scatter is on",
                fix=fix,
            )


def _stage_3(config: SpmdZeroConfig) -> None:
    if config.zero_optimization.stage < 3:
        return
    spmd = config.spmd
    if spmd.forward != "region":
        raise SpmdZeroConfigError(
            key="spmd.forward",
            value=spmd.forward,
            reason="at stage 3 parameters are gathered where the replica region uses them",
            fix='Write "region", or use stage 2.',
        )


def _shared_replicas(config: SpmdZeroConfig) -> None:
    for axis, (key, size) in config.axis_keys.items():
        written = config.spmd.mesh.get(axis)
        if size > 1 and written not in (None, size):
            raise SpmdZeroConfigError(
                key=key,
                value=size,
                reason=f"spmd.mesh has {written} devices on the axis {axis}, which is the same "
                "axis",
                fix="Write it once.",
            )
        if config.mesh_axes.get(axis, 1) != 1 and config.spmd.forward != "region":
            raise SpmdZeroConfigError(
                key="spmd.forward",
                value=config.spmd.forward,
                reason=f"the axis {axis} divides what happens in the replica region",
                fix=f'Write "region", or leave the axis {axis} out.',
            )
    axes, replicas = config.mesh_axes, config.data_parallel_size
    if replicas and axes.get("data", 1) * axes["fsdp"] != replicas:
        written = {
            axis: size for axis, size in config.spmd.mesh.items() if axis in ("data", "fsdp")
        }
        raise SpmdZeroConfigError(
            key="data_parallel_size",
            value=replicas,
            reason=f"spmd.mesh has {written}, whose product is the number of replicas",
            fix="Write it once.",
        )
    if axes.get("sequence", 1) != 1 != axes.get("tensor", 1):
        named = [each for axis, each in config.axis_keys.items() if axis not in config.spmd.mesh]
        key, value = named[0] if named else ("spmd.mesh", axes)
        raise SpmdZeroConfigError(
            key=key,
            value=value,
            reason=f"a replica is shared over the axis sequence ({axes['sequence']}) or over the "
            f"axis tensor ({axes['tensor']}), not both",
            fix="Write one of them: for long rows sequence_parallel_size, with "
            '"zero_optimization": {"stage": 3} for weights that are too large for a device.',
        )


def _parallel_passes(config: SpmdZeroConfig) -> None:
    """A pass of DeepCompile that divides a model is the mesh's axis here."""
    for name, axis in (("autosp", "sequence"), ("autotp", "tensor")):
        asked = config.compile.deepcompile and name in (config.compile.passes or ())
        if asked and config.mesh_axes.get(axis, 1) in (0, 1):
            key, _ = config.axis_keys[axis]
            raise SpmdZeroConfigError(
                key="compile.passes",
                value=config.compile.passes,
                reason=f"{name!r} divides the model over devices, and no key says over how many",
                fix=f"Write {key}, such as 2, or remove the pass.",
            )


def _experts_of_their_own(config: SpmdZeroConfig) -> None:
    """AutoEP's blocks in the place of the model's, with other routing, aren't built."""
    for name, value in config.expert_parallel.replaced().items():
        raise SpmdZeroConfigError(
            key=f"expert_parallel.{name}",
            value=value,
            reason="the experts and their router are computed by the model's own code, as its "
            "config says",
            fix="Remove the key, and set what it means in the model's config.",
        )
