"""Logs a summary of a run before anything is placed or compiled."""

import logging
from importlib.metadata import version

from torch import nn

from spmdzero._logging import is_new, log_once
from spmdzero.backend import current, local_replicas, runtime
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.engine._groups import Groups
from spmdzero.plan import MeshSpec, Role, ShardingPlan, sized
from spmdzero.precision import PrecisionPolicy, name_of

logger = logging.getLogger("spmdzero")
_BACKENDS = {"jax": "JAX"}
# What configs of transformers call the number of experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def say_start(
    settings: SpmdZeroConfig, batch: BatchSizes, mesh: MeshSpec, *, of_process: bool
) -> None:
    """Logs the run's settings, and the config's keys that have no effect.

    Engines with the same summary log it once, and each key is named once.

    Args:
        settings: the config.
        batch: the batch sizes on these devices.
        mesh: the mesh of all devices.
        of_process: whether a client counts its batch size per process, and not per device.
    """
    line = _line(settings, batch, mesh)
    if of_process and runtime.local_device_count() > 1:
        line += _of_client(batch, mesh)
    log_once(line)
    new = [key for key in settings.no_meaning if is_new(("without meaning", key))]
    if new:
        logger.info("config keys without effect here: %s (docs/config.md says why)", ", ".join(new))
        for key in new:
            logger.debug("%s has no effect here: %s", key, settings.no_meaning[key])


def say_offload(settings: SpmdZeroConfig, plan: ShardingPlan) -> None:
    """Logs once where the states rest that the config offloads."""
    zero, memory = settings.zero_optimization, plan.memory()
    optimizer, param = zero.offload_optimizer, zero.offload_param
    if optimizer is not None and optimizer.device == "cpu":
        on_host = dict(memory.on_host)
        there = on_host.get(Role.MASTER, 0) + on_host.get(Role.MOMENT, 0)
        left = memory[Role.MASTER] + memory[Role.MOMENT]
        log_once(f"offload_optimizer: masters and moments, {_rests(there, left)}")
    if param is not None and param.device == "cpu":
        if zero.stage < 3:
            log_once("offload_param has no effect below stage 3, as in DeepSpeed")
        else:
            there = dict(memory.on_host).get(Role.PARAMETER, 0)
            left = memory[Role.PARAMETER]
            log_once(f"offload_param: parameters, {_rests(there, left)}")


def say_lost_squares(groups: Groups | None, plan: ShardingPlan) -> None:
    """Logs once that bf16 loses what most steps add to the means of squared gradients."""
    slot = "exp_avg_sq"
    if groups is None or slot not in plan.moments or plan.slot_dtype(slot) != "bfloat16":
        return
    # A mean of fewer squares moves by more than bf16's steps of 1/256 to 1/128.
    decays = {group["betas"][1] for group in groups.groups if "betas" in group}
    for decay in sorted(decay for decay in decays if decay > 0.99):
        log_once(
            f"{slot} rests in bf16, whose steps are 1/256 of a value or more: with beta2 = "
            f"{decay:g} a training step moves it by {1 - decay:.2g} of the way to the squared "
            "gradient, of which rounding loses most, and the mean hardly falls again. "
            f'"spmd": {{"moments": {{"{slot}": "float32"}}}} keeps all digits'
        )


def say_experts(settings: SpmdZeroConfig, model: nn.Module) -> None:
    """Logs once what `expert_parallel` means for the model: where its experts rest."""
    if not settings.expert_parallel.enabled:
        return
    stage, config = settings.zero_optimization.stage, getattr(model, "config", None)
    counts = [count for name in _EXPERTS if isinstance(count := getattr(config, name, None), int)]
    if not counts:
        log_once("expert_parallel has no effect: the model's config names no number of experts")
        return
    rest = "rest as shards" if stage == 3 else f"rest whole at stage {stage}, as shards at stage 3"
    log_once(
        f"expert_parallel: each device computes its rows by all {counts[0]} experts, none left "
        f"out, with DeepSpeed's losses; experts {rest}"
    )


def _rests(there: int, left: int) -> str:
    """Where so many bytes a device rest.

    Args:
        there: in host memory.
        left: in the device's memory: what is small or whole, or all of it.
    """
    if there:
        small = f" ({sized(left)} of small ones on the devices)" if left else ""
        return f"{sized(there)} a device, rest in host memory{small}"
    why = (
        "each is whole, or too small to offload"
        if runtime.host_memory()
        else f"{_backend()} has no host memory beside {runtime.program_platform()} devices. The "
        "numbers are the same"
    )
    return f"{sized(left)} a device, rest on the devices: {why}"


def _line(settings: SpmdZeroConfig, batch: BatchSizes, mesh: MeshSpec) -> str:
    stage, policy = settings.zero_optimization.stage, PrecisionPolicy.from_config(settings)
    precision = name_of(policy.parameter)
    if policy.autocast is not None:
        precision += f" with autocast to {name_of(policy.autocast)}"
    how = ", ".join(
        (
            f"ZeRO-{stage}" if stage else "stage 0 (no ZeRO)",
            precision,
            _backend(),
            f"{_counted(mesh.size, f'{runtime.platform()} device')} on "
            f"{_counted(runtime.process_count(), 'host')}",
        )
    )
    hosts = f" x {runtime.process_count()} hosts" if runtime.process_count() > 1 else ""
    each = f"replica of {mesh.size // mesh.replicas} devices" if mesh.sharing else "device"
    return (
        f"spmdzero {version('spmdzero')}: {how}; {_rows(batch, mesh)} rows a process = "
        f"{batch.micro} a {each}, x {batch.accumulation} accumulation{hosts} = {batch.train} a step"
    )


def _backend() -> str:
    return _BACKENDS.get(current().name, current().name)


def _of_client(batch: BatchSizes, mesh: MeshSpec) -> str:
    rows, devices = _rows(batch, mesh), local_replicas(mesh)
    return (
        ". The client's batch size (per_device_train_batch_size, a loader's batch_size) is these "
        f"{rows} rows, which {devices} devices share: under DeepSpeed it would be {rows} rows on "
        f"each of {mesh.replicas} GPUs, {rows * mesh.replicas * batch.accumulation} a step"
    )


def _rows(batch: BatchSizes, mesh: MeshSpec) -> int:
    return batch.micro * local_replicas(mesh)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
