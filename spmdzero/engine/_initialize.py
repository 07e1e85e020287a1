"""From a config and a module to an engine."""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from spmdzero._logging import is_new
from spmdzero.backend.torch_xla import (
    DeviceMesh,
    GlobalForward,
    GradientReduction,
    RegionRules,
    ReplicaRegion,
    compile_cache,
    flags,
    runtime,
)
from spmdzero.compat import comm
from spmdzero.config import (
    NO_MEANING,
    SpmdZeroConfig,
    load_config,
    require_scaled_loss,
    resolve_batch_sizes,
)
from spmdzero.data._inputs import InputPlacer
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.engine._accumulation import planned_micro_batches
from spmdzero.engine._direct_calls import DirectCalls
from spmdzero.engine._engine import Engine
from spmdzero.engine._groups import Groups, Members, ParameterGroups, find_groups
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.engine._parameter import MastersFollow, adopt_parameters
from spmdzero.engine._placed_module import move_module
from spmdzero.engine._programs import Compiled
from spmdzero.engine._reports import set_up_reports
from spmdzero.engine._schedule import make_schedule
from spmdzero.engine._timed import TimedEngine
from spmdzero.engine._weights import Weights, open_weights
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.plan import MeshSpec, ParamSpec, ShardingPlan
from spmdzero.precision import GradientScaling, LossScaler, PrecisionPolicy
from spmdzero.step._autocast import autocast_wire
from spmdzero.step._gradient_path import GradientPath
from spmdzero.step._gradients import GradientStore
from spmdzero.step._loss_health import LossHealth
from spmdzero.step._schedule_hold import ScheduleHold

logger = logging.getLogger("spmdzero")

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: ParameterGroups | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | dict[str, Any] | None = None,
    mesh_param: None = None,
    config_params: str | dict[str, Any] | None = None,
    *,
    weights: Weights | None = None,
) -> tuple[Engine, ZeroOptimizer | None, ZeroDataLoader | None, Any]:
    """Places a module and its training state on all devices; DeepSpeed's signature.

    Args:
        args: a namespace whose `deepspeed_config` names the JSON, where `config` is not given.
        model: on the CPU, on the XLA device, or (with `weights`) on the meta device. It is moved
            in place: parameters replicated (bf16 when the config says so), optimizer states
            sharded by the config's ZeRO stage.
        optimizer: None takes the config's; a torch optimizer whose update is elementwise, or a
            callable from parameters (or groups) to one, brings its own param groups.
        model_parameters: parameters or param groups to train; the module's trainable ones.
        training_data: a dataset for the returned loader.
        lr_scheduler: None takes the config's; a schedule bound to `optimizer`, or a callable
            from the optimizer to one.
        distributed_port: without meaning, the launcher's environment names the port.
        dist_init_required: False requires that `init_distributed` was called before.
        mpu, mesh_param: refused, tensor parallelism is not ZeRO-1/2.
        collate_fn: samples -> batch, for the loader.
        config: path of a DeepSpeed JSON, or its dict. `config_params` is the old name.
        weights: spmdzero's own: a safetensors file, its index, or a folder with either; or a
            function from a tensor's name to its value on the CPU. Every parameter and buffer
            takes its value from there, one tensor at a time, cast to the model's dtype. Buffers
            with ``persistent=False`` that have a value keep it where a file lacks them.

    Returns engine, its optimizer, the loader (None without `training_data`) and the schedule.

    Raises:
        SpmdZeroConfigError: the config can't be honoured.
        SpmdZeroUsageError: an argument can't be used.
        SpmdZeroRuntimeError: a device was used before SPMD was on.
    """
    if not isinstance(model, nn.Module):
        raise SpmdZeroUsageError(
            f"initialize(model=...) needs a torch.nn.Module, got {type(model).__name__}"
        )
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise SpmdZeroUsageError(
                f"initialize({name}=...): spmdzero is data-parallel ZeRO-1/2, it has no model "
                'parallelism. Leave it out; "spmd": {"mesh": ...} shapes the data axes'
            )
    settings = load_config(config if config is not None else config_params, args=args)
    require_scaled_loss(settings, optimizer=optimizer or settings.optimizer)
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
    flags.apply(settings.spmd.xla_flags)
    compile_cache.use(settings.spmd.compile_cache)
    comm.connect(dist_init_required=dist_init_required)
    spec = MeshSpec.resolve(settings.spmd.mesh, device_count=runtime.device_count())
    batch = resolve_batch_sizes(settings, dp_world_size=spec.size)
    _log_keys_without_meaning(settings)
    mesh, precision = DeviceMesh(spec), PrecisionPolicy.from_config(settings)
    runtime.seed(torch.initial_seed() % 2**31)

    with open_weights(weights, model) as source:
        renewed = move_module(model, mesh=mesh, dtype=precision.parameter, source=source)
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    groups = find_groups(
        settings.optimizer,
        optimizer,
        model_parameters,
        Members(names, renewed),
        device=runtime.device(),
    )
    if groups is not None:
        groups.require_tested(
            stage=settings.zero_optimization.stage, allowed=settings.zero_allow_untested_optimizer
        )
    in_region = settings.spmd.forward == "region"
    plan = ShardingPlan.build(
        _parameters(model, groups),
        stage=settings.zero_optimization.stage,
        mesh=spec,
        min_shard_elements=settings.spmd.min_shard_elements,
        master=precision.master,
        moments=groups.slots if groups else (),
        moment_dtype=_name(precision.moment),
        accumulator_dtype=_name(precision.accumulate),
        accumulation_steps=planned_micro_batches(settings, batch),
        partial=in_region,
    )
    reduction = GradientReduction(
        mesh=mesh, method=_reduction_method(settings, spec), dtype=precision.communicate
    )
    # Without an optimizer nobody would multiply the loss by the scale, nor update it.
    scaled = settings.fp16.enabled and groups is not None
    scaler = LossScaler.from_config(settings.fp16) if scaled else None
    scaling = GradientScaling.from_config(settings, devices=spec.size)
    path = GradientPath(
        plan=plan,
        mesh=mesh,
        reduction=reduction,
        scaling=scaling,
        wire=autocast_wire(model, settings.torch_autocast, precision),
    )
    gradients = GradientStore(path, loss_scale=lambda: scaler.cur_scale if scaler else 1.0)
    health = LossHealth(mesh=mesh, check=settings.spmd.check_finite)
    zero = None
    if groups is not None:
        zero = ZeroOptimizer(
            groups.groups,
            names=names,
            rules=groups.rules,
            plan=plan,
            mesh=mesh,
            precision=precision,
            gradients=gradients,
            clip=settings.gradient_clipping,
            finite=health.finite,
            scaler=scaler,
        )
    rules = _region_rules(settings)
    placer = InputPlacer(mesh=mesh, module=model, rules=rules, micro_batch=batch.micro)
    forward: ReplicaRegion | GlobalForward
    if in_region:
        forward = ReplicaRegion(
            mesh=mesh,
            module=model,
            sink=gradients.add_local,
            rules=rules,
            seed=scaling.seed,
            autocast=precision.autocast,
        )
    else:
        forward = GlobalForward(mesh=mesh, module=model, autocast=precision.autocast)
    engine = (TimedEngine if settings.wall_clock_breakdown else Engine)(
        module=model,
        config=settings,
        batch=batch,
        plan=plan,
        mesh=mesh,
        placer=placer,
        forward=forward,
        gradients=gradients,
        optimizer=zero,
        lr_scheduler=make_schedule(settings.scheduler, lr_scheduler, zero, groups),
        health=health,
    )
    if zero is not None and engine.lr_scheduler is not None:
        zero.hold = ScheduleHold()
    engine.client_optimizer = groups.client if groups is not None else None
    set_up_reports(engine)
    if training_data is not None:
        engine.training_dataloader = ZeroDataLoader(
            training_data,
            mesh=mesh,
            placer=placer,
            steps=lambda: engine.micro_steps,
            batch_dim=rules.batch_dim,
            drop_last=settings.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    adopt_parameters(engine)
    if in_region:
        # A global forward is what the module does anyway.
        engine._direct_calls = DirectCalls(engine)
        engine._direct_calls.watch(model)
    if zero is not None:
        MastersFollow(zero).watch(model)
    # States that are still pending would make the first step another program than the second.
    before = Compiled.so_far()
    runtime.sync()
    engine.programs.initial = Compiled.so_far() - before
    return engine, zero, engine.training_dataloader, engine.lr_scheduler


def _log_keys_without_meaning(settings: SpmdZeroConfig) -> None:
    new = [key for key in settings.no_meaning if is_new(("without meaning", key))]
    if new:
        logger.info("config keys without effect here: %d (docs/config.md)", len(new))
        for key in new:
            logger.debug("%s has no effect here: %s", key, NO_MEANING[key])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parameters(model: nn.Module, groups: Groups | None) -> Iterable[ParamSpec]:
    slots = groups.slots_by_parameter() if groups else {}
    for name, parameter in model.named_parameters():
        yield ParamSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=_name(parameter.dtype),
            trainable=parameter.requires_grad and (groups is None or parameter in slots),
            moments=slots.get(parameter, ()) if groups and groups.has_many_layouts else None,
        )


def _reduction_method(settings: SpmdZeroConfig, spec: MeshSpec) -> Any:
    if settings.spmd.reduction != "auto":
        return settings.spmd.reduction
    # On a two-axis mesh libtpu turns an annotated sum into an all-reduce of everything.
    return "explicit" if spec.data > 1 else "annotated"


def _region_rules(settings: SpmdZeroConfig) -> RegionRules:
    dims = settings.spmd.batch_dim
    by_name = dims if isinstance(dims, dict) else {}
    return RegionRules(
        batch_dim=dims if isinstance(dims, int) else 0,
        input_batch_dims=by_name,
        outputs=settings.spmd.outputs,
    )
