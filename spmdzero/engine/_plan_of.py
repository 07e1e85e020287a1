"""Makes the sharding plan of a config and a model, without devices."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from spmdzero.config import BatchSizes, SpmdZeroConfig, resolve_batch_sizes
from spmdzero.engine._groups import Groups, Members, find_groups
from spmdzero.engine._tensor_axis import tensor_dims
from spmdzero.plan import (
    MeshSpec,
    ParamSpec,
    Role,
    ShardingPlan,
)
from spmdzero.precision import PrecisionPolicy


def plan_of(config: SpmdZeroConfig, model: nn.Module, *, devices: int) -> ShardingPlan:
    """The plan that `initialize` would make for a config and a model on `devices` devices.

    Args:
        config: the config, which names the optimizer if there is one.
        model: a module on the CPU or the meta device; it is left as it is.
        devices: number of devices of all hosts together.

    Raises:
        SpmdZeroConfigError: the optimizer can't run on shards, or the mesh or the batch sizes
            don't fit the devices.
    """
    members = Members(model, renewed={})
    groups = find_groups(config.optimizer, None, None, members, device=torch.device("cpu"))
    mesh = mesh_of(config, devices)
    batch = resolve_batch_sizes(config, dp_world_size=mesh.replicas)
    shared = tensor_dims(config, model, mesh=mesh)
    return planned(
        config, model, groups, batch=batch, mesh=mesh, shared=shared, on_host=offloaded(config)
    )


def mesh_of(config: SpmdZeroConfig, devices: int) -> MeshSpec:
    """The config's mesh of `devices` devices; raises SpmdZeroConfigError where it doesn't fit."""
    zero = config.zero_optimization
    group = zero.zero_hpz_partition_size if zero.stage == 3 else 1
    return MeshSpec.resolve(config.mesh_axes, device_count=devices, group=group)


def planned(
    config: SpmdZeroConfig,
    model: nn.Module,
    groups: Groups | None,
    *,
    batch: BatchSizes,
    mesh: MeshSpec,
    shared: Mapping[str, int],
    on_host: Sequence[Role],
) -> ShardingPlan:
    """The plan of where every tensor of the training state lives, or will when it is placed.

    Args:
        config: gives stage, precision, and the size below which a tensor isn't split.
        model: a module on any device.
        groups: the trained parameters; None without an optimizer, or before there is one, which
            changes no parameter's own placement.
        batch: tells whether gradients have to wait for other micro-batches.
        mesh: the devices.
        shared: as of `tensor_dims`.
        on_host: the roles that rest in the memory of the hosts.

    Raises:
        SpmdZeroConfigError: ``spmd.moments`` names what the optimizer doesn't keep.
    """
    precision = PrecisionPolicy.from_config(config)
    if groups is not None:
        groups.require_slots(config.spmd.moments)
    return ShardingPlan.build(
        _parameters(config, model, groups, precision.parameter, shared),
        stage=config.zero_optimization.stage,
        mesh=mesh,
        min_shard_elements=config.spmd.min_shard_elements,
        master=precision.master,
        moments=groups.slots if groups else (),
        moment_dtype=_name(precision.moment),
        slot_dtypes=tuple((slot, _name(dtype)) for slot, dtype in precision.slots.items()),
        accumulator_dtype=_name(precision.accumulate),
        accumulation_steps=planned_micro_batches(config, batch),
        partial=config.spmd.forward == "region",
        on_host=tuple(on_host),
    )


def offloaded(config: SpmdZeroConfig) -> tuple[Role, ...]:
    """The roles that the config has rest in the memory of the hosts, where it can be used."""
    zero, found = config.zero_optimization, list[Role]()
    if zero.offload_param is not None and zero.offload_param.device == "cpu" and zero.stage == 3:
        found.append(Role.PARAMETER)
    if zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu":
        found += [Role.MASTER, Role.MOMENT]
    return tuple(found)


def planned_micro_batches(config: SpmdZeroConfig, batch: BatchSizes) -> int:
    """The number of micro-batches of a step for which the plan makes accumulators."""
    # A caller that ends steps himself may have more than one micro-batch in any step.
    return max(1 if config.managed_gradient_accumulation else 2, batch.accumulation)


def _persistent(config: SpmdZeroConfig, model: nn.Module) -> set[str]:
    """Names of the parameters that stage 3 keeps whole because they are small.

    Source: DeepSpeed, runtime/zero/parameter_offload.py, `mark_persistent_parameters`.
    """
    zero, total, found = config.zero_optimization, 0, set[str]()
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        if total + count > zero.stage3_model_persistence_threshold:
            continue
        if count <= zero.stage3_param_persistence_threshold:
            found.add(name)
            total += count
    return found


def _parameters(
    config: SpmdZeroConfig,
    model: nn.Module,
    groups: Groups | None,
    dtype: torch.dtype,
    shared: Mapping[str, int],
) -> Iterable[ParamSpec]:
    slots, kept_whole = groups.slots_by_parameter() if groups else {}, _persistent(config, model)
    usual = groups.slots if groups else ()
    for name, parameter in model.named_parameters():
        own = slots.get(parameter, ())
        names = tuple(slot.name for slot in own)
        yield ParamSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=_name(dtype if parameter.is_floating_point() else parameter.dtype),
            trainable=parameter.requires_grad and (groups is None or parameter in slots),
            moments=names if parameter in slots and names != usual else None,
            persistent=name in kept_whole,
            tensor_dim=shared.get(name),
            eight_bits=tuple(slot.name for slot in own if slot.eight_bits),
            shapes=tuple((slot.name, slot.shape) for slot in own if slot.shape is not None),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
