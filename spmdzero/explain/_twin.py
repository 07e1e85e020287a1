"""The programs for TPUs, traced from a twin of the model that is never run.

A program may differ by platform: on a TPU it has kernels, which the CPU can't run. So the step that
the CPU trains is traced once more, for TPUs, from copies without data.
"""

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from spmdzero.backend import AttentionCall, Torus, on_torus, runtime, tracing_only
from spmdzero.backend.protocols._region import Policy
from spmdzero.engine import Engine, initialize
from spmdzero.errors import SpmdZeroError
from spmdzero.explain._chips import Topology
from spmdzero.explain._trace import Batch, TracedProgram
from spmdzero.explain._without_data import bring_to_devices, trace_without_data

_Read = TypeVar("_Read")

# Sections with which the twin's engine would write files or lines beside those of the first engine.
_REPORTS = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "dump_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForTpu:
    """A step for TPUs.

    Attributes:
        programs: the programs for TPUs.
        attention: the programs' calls of attention.
        note: why the programs are the CPU's, "" if they are not.
    """

    programs: tuple[TracedProgram, ...]
    attention: tuple[AttentionCall, ...] = ()
    note: str = ""


def traced_for_tpu(model: nn.Module, config: Mapping[str, Any], batch: Batch) -> ForTpu:
    """Traces the step of a model on the CPU or the meta device; the model stays as it is.

    Raises:
        SpmdZeroError: the step can't be traced without data.
    """
    return _traced(lambda: hollow(model), config, _for_tpu(batch))


def on_each_torus(
    topologies: Sequence[Topology],
    trace: Callable[[], ForTpu],
    *,
    known: Mapping[Torus | None, ForTpu] = MappingProxyType({}),
) -> dict[str, ForTpu]:
    """Name of each topology -> its traced step; topologies with the same program share a trace.

    Args:
        topologies: the topologies.
        trace: traces the step for the torus that is set.
        known: steps that are already traced, by `Topology.torus_to_trace`.
    """
    traced = dict(known)
    for topology in topologies:
        torus = topology.torus_to_trace
        if torus not in traced:
            with on_torus(torus):
                traced[torus] = trace()
    return {topology.name: traced[topology.torus_to_trace] for topology in topologies}


def twin_or(own: tuple[TracedProgram, ...], trace: Callable[[], ForTpu]) -> ForTpu:
    """The result of `trace`, or the CPU's programs `own` with the reason.

    A model that reads a value of its weights, for example, can only be traced with data.
    """
    try:
        return trace()
    except (SpmdZeroError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return ForTpu(
            programs=own,
            note="The programs for TPUs are the CPU's, without kernels: traced for a TPU, without "
            f"data, the step ends in: {said[0]}",
        )


def engine_for_tpu(engine: Engine, batch: Batch) -> ForTpu:
    """Traces the step of an engine in training, which goes on training afterwards.

    Raises:
        SpmdZeroError: the step can't be traced without data.
        RuntimeError: the same, or the optimizer's class needs more arguments than param groups.
    """
    return on_twin(engine, _for_tpu(batch), platform="TPU")


def _for_tpu(batch: Batch) -> Callable[[Engine], ForTpu]:
    def traced(twin: Engine) -> ForTpu:
        return ForTpu(programs=trace_without_data(twin, batch), attention=twin.attention)

    return traced


def on_twin(
    engine: Engine,
    read: Callable[[Engine], _Read],
    *,
    platform: str | None = None,
    recompute: Policy | None = None,
) -> _Read:
    """Returns what `read` makes of an engine without data that is otherwise like `engine`.

    Args:
        engine: an engine in training, which goes on training afterwards.
        read: traces programs of its argument.
        platform: of the programs, None for that of this process's devices.
        recompute: the policy of the twin's blocks, None for that of `engine`.

    Raises:
        SpmdZeroError: the step can't be traced without data.
        RuntimeError: the same, or the optimizer's class needs more arguments than param groups.
    """
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    config = {key: value for key, value in engine.config.items() if key not in _REPORTS}
    config.pop("train_batch_size", None)
    config["train_micro_batch_size_per_gpu"] = engine.train_micro_batch_size_per_gpu()
    config["gradient_accumulation_steps"] = engine.gradient_accumulation_steps()
    config["spmd"] = {
        **(config.get("spmd") or {}), "recompute": recompute or _policy_of(engine)
    }  # fmt: skip
    client = engine.client_optimizer

    def trained(twin: nn.Module) -> dict[str, Any]:
        own = dict(twin.named_parameters())
        if client is not None:
            groups = [_group(group, names, own) for group in client.param_groups]
            try:
                made: Any = type(client)
                return {"optimizer": made(groups)}
            except TypeError as error:
                raise RuntimeError(f"{type(client).__name__} is not made again: {error}") from error
        if engine.optimizer is None:
            return {}
        mine = [p for group in engine.optimizer.param_groups for p in group["params"]]
        return {"model_parameters": [own[names[parameter]] for parameter in mine]}

    with _unharmed():
        return _traced(
            lambda: hollow(engine.module), config, read, trained=trained, platform=platform
        )


def on_hollow(
    model: nn.Module,
    config: Mapping[str, Any],
    read: Callable[[Engine], _Read],
    *,
    platform: str | None = None,
) -> _Read:
    """Returns what `read` makes of an engine without data.

    Args:
        model: on the CPU or the meta device; it stays as it is.
        config: a DeepSpeed JSON as a dict.
        read: traces programs of its argument.
        platform: of the programs, None for that of this process's devices.

    Raises:
        SpmdZeroError: the step can't be traced without data.
    """
    with _unharmed():
        return _traced(lambda: hollow(model), config, read, platform=platform)


def _policy_of(engine: Engine) -> Any:
    """How the engine recomputes; what it hasn't picked yet is computed once."""
    told = engine.spmd_config.spmd
    return "nothing" if told.fits_recompute else told.recompute


def _traced(
    copied: Callable[[], nn.Module],
    config: Mapping[str, Any],
    read: Callable[[Engine], _Read],
    *,
    trained: Callable[[nn.Module], dict[str, Any]] = lambda _: {},
    platform: str | None = "TPU",
) -> _Read:
    try:
        with tracing_only(platform=platform):
            twin = copied()
            bring_to_devices(twin)
            engine, *_ = initialize(model=twin, config=dict(config), **trained(twin))
            return read(engine)
    finally:
        # Tensors without data would make the next program of this process fail.
        twin = engine = None
        gc.collect()


def hollow(module: nn.Module) -> nn.Module:
    """A copy on the meta device, with the same tied tensors."""
    copies: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = empty
    with torch.no_grad():
        return copy.deepcopy(module, copies)


def _group(
    group: Mapping[str, Any], names: Mapping[Any, str], own: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    return {**group, "params": [own[names[parameter]] for parameter in group["params"]]}


@contextlib.contextmanager
def _unharmed() -> Iterator[None]:
    """Restores the generators afterwards, as if nothing had been traced."""
    devices, host = runtime.generator_state(), torch.get_rng_state()
    try:
        yield
    finally:
        runtime.seed(devices)
        torch.set_rng_state(host)
