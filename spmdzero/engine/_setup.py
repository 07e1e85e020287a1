"""The parts of `initialize`: config, backend, placed module, training."""

import logging
import math
from typing import Any

import torch
from torch import nn

from spmdzero._logging import log_once
from spmdzero.backend import (
    Forward,
    Mesh,
    Reduction,
    Region,
    RegionRules,
    choose,
    current,
    flags,
    follow_torchs_seed,
    runtime,
)
from spmdzero.backend.hosts import processes
from spmdzero.backend.protocols._region import LowPrecision
from spmdzero.config import (
    FP16_WITHOUT_ZERO,
    BatchSizes,
    SpmdZeroConfig,
    load_config,
    resolve_batch_sizes,
)
from spmdzero.data._inputs import InputPlacer
from spmdzero.engine._clients_optimizer import take_over
from spmdzero.engine._elastic import tell_sizes
from spmdzero.engine._fp32_buffers import keep_in_fp32
from spmdzero.engine._groups import Groups, Members, find_groups
from spmdzero.engine._low_precision import require_low_precision
from spmdzero.engine._plan_of import mesh_of, offloaded
from spmdzero.engine._schedule import make_schedule
from spmdzero.engine._start_line import say_experts, say_lost_squares, say_offload
from spmdzero.engine._unwrapped import unwrapped
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError, UsageAssertionError
from spmdzero.nn._bitsandbytes import take_values
from spmdzero.nn._causal_lm import fuse_causal_lm_losses
from spmdzero.plan import MeshSpec, Role, ShardingPlan
from spmdzero.precision import GradientScaling, LossScaler, PrecisionPolicy
from spmdzero.state._placed_module import move_module
from spmdzero.state._same_on_hosts import (
    on_host,
    require_same_settings,
    require_same_structure,
    require_same_values,
    take_first_hosts_values,
)
from spmdzero.state._training import Training
from spmdzero.state._weights import Weights, open_weights
from spmdzero.step._gradient_path import GradientPath, autocast_wire
from spmdzero.step._gradients import GradientStore
from spmdzero.step._loss_health import LossHealth
from spmdzero.step._optimizer import ZeroOptimizer
from spmdzero.step._schedule_hold import ScheduleHold
from spmdzero.step._state import State

logger = logging.getLogger("spmdzero")


def require_module(model: object) -> nn.Module:
    """Returns the module to train: the model, without what a script for GPUs wrapped it in.

    Linear layers that bitsandbytes has quantized become plain ones.

    Raises:
        UsageAssertionError: the model is no module.
        SpmdZeroUsageError: bitsandbytes has quantized something else of it.
    """
    if not isinstance(model, nn.Module):
        raise UsageAssertionError(
            f"initialize(model=...) needs a torch.nn.Module, got {type(model).__name__}"
        )
    module = unwrapped(model)
    if layers := take_values(module):
        logger.info(
            "%d linear layers of bitsandbytes are plain ones here, frozen, with the values of "
            "their 4 or 8 bits (docs/eight_bits.md). ZeRO stage 3 divides them among the devices",
            layers,
        )
    return module


def read_settings(config: Any) -> SpmdZeroConfig:
    """The config, checked; loggers and warnings follow it.

    Raises:
        SpmdZeroConfigError: it can't be honoured.
    """
    settings = load_config(config)
    if settings.log_level is not None:
        logger.setLevel(settings.log_level.upper())
    if settings.spmd.forward == "global" and settings.communication_data_type is not None:
        raise SpmdZeroConfigError(
            key="communication_data_type",
            value=settings.communication_data_type,
            reason="with a global forward the compiler reduces in the gradient's own dtype",
            fix='Leave it out, or write "spmd": {"forward": "region"}.',
        )
    if settings.spmd.forward == "global" and settings.torch_autocast.enabled:
        logger.warning(
            "torch_autocast with a global forward: the compiler reduces gradients in their own "
            "dtype, not in autocast's as DeepSpeed does"
        )
    return settings


def start_backend(
    settings: SpmdZeroConfig, *, dist_init_required: bool | None
) -> tuple[Mesh, BatchSizes]:
    """Chooses the backend, connects all hosts, lays the config's mesh over their devices.

    Raises:
        SpmdZeroConfigError: the backend isn't installed, or the process uses the other one; or the
            mesh doesn't fit the devices.
    """
    spec = start_devices(settings, dist_init_required=dist_init_required)
    batch = resolve_batch_sizes(settings, dp_world_size=spec.replicas, platform=runtime.platform())
    tell_sizes(settings, batch)
    mesh = current().mesh(spec)
    follow_torchs_seed(runtime.seed)
    return mesh, batch


def start_devices(settings: SpmdZeroConfig, *, dist_init_required: bool | None) -> MeshSpec:
    """Chooses the backend, connects all hosts; returns the config's mesh of their devices.

    Raises:
        SpmdZeroConfigError: as in `start_backend`, except for the batch sizes.
    """
    choose(settings.spmd.backend)
    _refuse_what_is_lacking(settings)
    flags.apply(settings.spmd.xla_flags)
    flags.use_cache(settings.spmd.compile_cache)
    processes.watch_with(timeout=settings.spmd.timeout)
    processes.connect(required=dist_init_required)
    require_shared_folder(settings, hosts=runtime.process_count())
    require_same_settings(settings)
    spec = mesh_of(settings, runtime.device_count())
    require_sharing_within_host(spec, devices=runtime.local_device_count())
    return spec


def require_shared_folder(settings: SpmdZeroConfig, *, hosts: int) -> None:
    """Refuses folders of the hosts' own for checkpoints, which several hosts write together.

    Raises:
        SpmdZeroConfigError: the config asks for them, and there are several hosts.
    """
    if settings.checkpoint.use_node_local_storage and hosts > 1:
        raise SpmdZeroConfigError(
            key="checkpoint.use_node_local_storage",
            value=True,
            reason=f"the {hosts} hosts write one checkpoint into one folder that all of them see",
            fix="Remove the key, and pass save_checkpoint a folder on shared storage.",
        )


def require_sharing_within_host(spec: MeshSpec, *, devices: int) -> None:
    """Refuses axes along which devices of several hosts would share a replica.

    Args:
        spec: the mesh.
        devices: number of devices of a host.

    Raises:
        SpmdZeroConfigError: their sizes don't divide it.
    """
    if devices % math.prod(spec.sharing.values()):
        axes = " and ".join(f"{axis} ({size})" for axis, size in spec.sharing.items())
        raise SpmdZeroConfigError(
            key="spmd.mesh",
            value=dict(spec.axes),
            reason=f"a host has {devices} devices, and the axis {axes} would go from host to host",
            fix=f"Choose a size that divides {devices}.",
        )


# What to do in the place of an axis that devices of a replica share.
_WITHOUT = {
    "sequence": 'recompute blocks for rows that are too long: "spmd": {"recompute": "everything"}',
    "tensor": "use ZeRO stage 3 for a model that is too large",
}


def _refuse_what_is_lacking(settings: SpmdZeroConfig) -> None:
    backend = current()
    if settings.spmd.fits_recompute and backend.device_memory is None:
        raise SpmdZeroConfigError(
            key="spmd.recompute",
            value=settings.spmd.recompute,
            reason=f"the backend {backend.name} doesn't say what a program takes before it runs",
            fix='Write "everything", which keeps the least, or "spmd": {"backend": "jax"}.',
        )
    for axis, (key, named) in settings.axis_keys.items():
        size = settings.mesh_axes.get(axis, 1)
        if size != 1 and not backend.shared_replicas:
            raise SpmdZeroConfigError(
                key=key if named > 1 else "spmd.mesh",
                value=size if named > 1 else settings.spmd.mesh,
                reason=f"the replica region of the backend {backend.name} divides all axes of "
                f"the mesh, and leaves none, such as {axis}, to the compiler",
                fix=f'Write "spmd": {{"backend": "jax"}}, or {_WITHOUT[axis]}.',
            )
    if settings.spmd.attention == "kernel" and not backend.attention_kernels:
        raise SpmdZeroConfigError(
            key="spmd.attention",
            value="kernel",
            reason=f"the backend {backend.name} computes attention as plain products",
            fix='Write "plain", or "spmd": {"backend": "jax"}, which has kernels.',
        )
    require_low_precision(settings)
    if settings.spmd.scan != "off" and not backend.loops:
        raise SpmdZeroConfigError(
            key="spmd.scan",
            value=settings.spmd.scan,
            reason=f"programs of the backend {backend.name} have no loops over equal blocks",
            fix='Write "off", or "spmd": {"backend": "jax"}, which has them.',
        )


def rest_on_host(settings: SpmdZeroConfig) -> tuple[Role, ...]:
    """The roles that rest in the memory of the hosts: those offloaded, where programs reach it."""
    roles = offloaded(settings)
    # To find out may compile a program.
    return roles if roles and runtime.host_memory() else ()


def place_module(
    settings: SpmdZeroConfig,
    model: nn.Module,
    mesh: Mesh,
    plan: ShardingPlan,
    weights: Weights | None,
    optimizer: tuple[Any, Any],
) -> Groups | None:
    """Moves the module to the devices; returns its trained groups, None without an optimizer.

    Args:
        plan: says where each parameter lives.
        optimizer: the arguments `optimizer` and `model_parameters` of `initialize`.

    Raises:
        SpmdZeroUsageError: a parameter's dtype isn't fp32, and neither the bf16 nor the fp16
            section is on (as in DeepSpeed).
    """
    dtype = PrecisionPolicy.from_config(settings).parameter
    if settings.spmd.fused_loss:
        fuse_causal_lm_losses(model)
    require_same_structure(model)
    if dtype == torch.float32:
        _require_fp32(model, autocast=settings.torch_autocast.enabled)
    else:
        keep_in_fp32(model, settings.data_types.keep_in_fp32_modules, dtype=dtype)
    known = frozenset[str]() if weights is not None else on_host(model)
    if settings.spmd.broadcast and runtime.process_count() > 1:
        take_first_hosts_values(model, known)
    require_same_values(model, known)
    with open_weights(weights, model) as source:
        renewed = move_module(model, mesh=mesh, dtype=dtype, source=source, plan=plan)
    require_same_values(model, {name for name, _ in model.named_parameters()} - known)
    members = Members(model, renewed)
    groups = find_groups(settings.optimizer, *optimizer, members, device=runtime.device())
    if groups is not None:
        groups.require_tested(
            stage=settings.zero_optimization.stage, allowed=settings.zero_allow_untested_optimizer
        )
    return groups


def _require_fp32(model: nn.Module, *, autocast: bool) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype == torch.float32:
            continue
        fix = "Call model.float()"
        if autocast:
            fix += ", torch_autocast rounds inside of the forward"
        section = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(parameter.dtype)
        if section is not None:
            off = "turn torch_autocast off and " if autocast else ""
            fix += f', or {off}set "{section}": {{"enabled": true}}'
        raise SpmdZeroUsageError(
            f"{name} is {parameter.dtype}, but the config asks for fp32. {fix}"
        )


def make_training(
    settings: SpmdZeroConfig,
    model: nn.Module,
    groups: Groups | None,
    lr_scheduler: Any,
    optimizer_class: type[ZeroOptimizer],
    *,
    batch: BatchSizes,
    plan: ShardingPlan,
    mesh: Mesh,
) -> Training:
    """Makes the training state on the devices, with all parts that a step needs."""
    say_offload(settings, plan)
    say_lost_squares(groups, plan)
    say_experts(settings, model)
    precision, rules = PrecisionPolicy.from_config(settings), _region_rules(settings)
    scaler = _scaler(settings, groups, plan)
    path = GradientPath(
        plan=plan,
        mesh=mesh,
        reduction=_reduction(settings, mesh),
        scaling=GradientScaling.from_config(settings, replicas=mesh.replicas),
        wire=autocast_wire(model, settings.torch_autocast, precision),
    )
    state = State(model, plan=plan, mesh=mesh)
    gradients = GradientStore(path, state, loss_scale=lambda: scaler.used if scaler else 1.0)
    health = LossHealth(state, check=settings.spmd.check_finite)
    optimizer = (
        None
        if groups is None
        else optimizer_class(
            groups.groups,
            rules=groups.rules,
            held=state,
            precision=precision,
            gradients=gradients,
            clip=settings.gradient_clipping,
            finite=health.finite,
            scaler=scaler,
        )
    )
    schedule = make_schedule(settings.scheduler, lr_scheduler, optimizer, groups)
    if groups is not None and optimizer is not None:
        if groups.client is None:
            optimizer.configured = groups.name
        else:
            take_over(groups.client, optimizer)
    if optimizer is not None and schedule is not None:
        optimizer.hold = ScheduleHold()
    forward = _forward(settings, gradients, rules, optimizer, plan, module=model, mesh=mesh)
    if isinstance(forward, Region):
        state.flags = forward.disagreements
    return Training(
        state=state,
        spmd_config=settings,
        batch=batch,
        placer=InputPlacer(mesh=mesh, module=model, rules=rules, micro_batch=batch.micro),
        forward=forward,
        gradients=gradients,
        optimizer=optimizer,
        lr_scheduler=schedule,
        health=health,
    )


def _scaler(
    settings: SpmdZeroConfig, groups: Groups | None, plan: ShardingPlan
) -> LossScaler | None:
    # Without an optimizer no code would multiply the loss by the scale, or update the scale.
    if not settings.fp16.enabled or groups is None:
        return None
    if plan.stage == 0:
        log_once(FP16_WITHOUT_ZERO)
    return LossScaler.from_config(settings.fp16, stage=plan.stage)


def _forward(
    settings: SpmdZeroConfig,
    gradients: GradientStore,
    rules: RegionRules,
    optimizer: ZeroOptimizer | None,
    plan: ShardingPlan,
    **where: Any,
) -> Region | Forward:
    if optimizer is not None:
        where["wrote"] = optimizer.follow_writes
    where["autocast"] = PrecisionPolicy.from_config(settings).autocast
    if current().attention_kernels:
        where["attention"] = settings.spmd.attention
    where["keep_on_host"] = settings.activation_checkpointing.cpu_checkpointing
    if settings.spmd.forward == "global":
        return current().global_forward(**where)
    seed = GradientScaling.from_config(settings, replicas=where["mesh"].replicas).seed
    recompute = "nothing" if settings.spmd.fits_recompute else settings.spmd.recompute
    where["recompute"] = recompute
    if settings.spmd.scan != "off":
        where["scan"] = settings.spmd.scan
    if (products := settings.spmd.products) is not None:
        skip = None if products.skip is None else tuple(products.skip)
        where["products"] = LowPrecision(dtype=products.dtype, recipe=products.scaled_by, skip=skip)
    resting = {name: plan.at_rest(f"parameter/{name}") for name in plan.names}
    if shards := {name: layout for name, layout in resting.items() if layout.is_sharded}:
        where |= {"layouts": shards, "parts": lambda: gradients.path}
        if settings.zero_optimization.zero_quantized_weights:
            where["in_int8"] = True
    return current().region(sink=gradients.add_local, rules=rules, seed=seed, **where)


def _reduction(settings: SpmdZeroConfig, mesh: Mesh) -> Reduction:
    dtype = PrecisionPolicy.from_config(settings).communicate
    zero = settings.zero_optimization
    in_int8 = {"in_int8": True} if zero.zero_quantized_gradients and zero.stage == 3 else {}
    return current().reduction(mesh=mesh, method=settings.spmd.reduction, dtype=dtype, **in_int8)


def _region_rules(settings: SpmdZeroConfig) -> RegionRules:
    dims = settings.spmd.batch_dim
    return RegionRules(
        batch_dim=dims if isinstance(dims, int) else 0,
        input_batch_dims=dims if isinstance(dims, dict) else {},
        outputs=settings.spmd.outputs,
    )
