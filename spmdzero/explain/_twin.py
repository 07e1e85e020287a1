"""The programs for TPUs, of a twin that is traced and never run.

A program may differ by platform: on a TPU it has kernels, which the CPU can't run. So what the CPU
trains is traced once more, for TPUs, from copies without data.
"""

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from spmdzero.backend import AttentionCall, Torus, runtime
from spmdzero.engine import Engine, initialize
from spmdzero.errors import SpmdZeroError
from spmdzero.explain._chips import Topology
from spmdzero.explain._trace import Batch, TracedProgram
from spmdzero.explain._without_data import bring_to_devices, trace_without_data

# An engine with these would write files, or lines, beside the first one's.
_REPORTS = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "dump_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForTpu:
    """A step as it is for TPUs.

    Attributes:
        programs: those that TPUs get.
        attention: how they compute attention.
        note: why they are the CPU's, "" where they are not.
    """

    programs: tuple[TracedProgram, ...]
    attention: tuple[AttentionCall, ...] = ()
    note: str = ""


def traced_for_tpu(model: nn.Module, config: Mapping[str, Any], batch: Batch) -> ForTpu:
    """The step of a model on the CPU or the meta device, which stays as it is.

    Raises:
        SpmdZeroError: it can't be traced without data.
    """
    return _traced(lambda: _hollow(model), config, batch)


def on_each_torus(
    topologies: Sequence[Topology],
    trace: Callable[[], ForTpu],
    *,
    known: Mapping[Torus | None, ForTpu] = MappingProxyType({}),
) -> dict[str, ForTpu]:
    """What `trace` returns for each topology, by its name; once for those that it is the same on.

    Args:
        known: what was traced already, by `Topology.torus_to_trace`.
    """
    traced = dict(known)
    for topology in topologies:
        torus = topology.torus_to_trace
        if torus not in traced:
            with runtime.on_torus(torus):
                traced[torus] = trace()
    return {topology.name: traced[topology.torus_to_trace] for topology in topologies}


def twin_or(own: tuple[TracedProgram, ...], trace: Callable[[], ForTpu]) -> ForTpu:
    """What `trace` returns, or `own`, the CPU's programs, and why.

    A model that reads a value of its weights, for example, is traced with data only.
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
    """The step of an engine that trains, and trains on afterwards.

    Raises:
        SpmdZeroError: it can't be traced without data.
        RuntimeError: likewise, or its optimizer's class takes more than param groups.
    """
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    config = {key: value for key, value in engine.config.items() if key not in _REPORTS}
    config.pop("train_batch_size", None)
    config["train_micro_batch_size_per_gpu"] = engine.train_micro_batch_size_per_gpu()
    config["gradient_accumulation_steps"] = engine.gradient_accumulation_steps()
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
        return _traced(lambda: _hollow(engine.module), config, batch, trained=trained)


def _traced(
    copied: Callable[[], nn.Module],
    config: Mapping[str, Any],
    batch: Batch,
    *,
    trained: Callable[[nn.Module], dict[str, Any]] = lambda _: {},
) -> ForTpu:
    try:
        with runtime.tracing_only(platform="TPU"):
            twin = copied()
            bring_to_devices(twin)
            engine, *_ = initialize(model=twin, config=dict(config), **trained(twin))
            programs = trace_without_data(engine, batch)
            return ForTpu(programs=programs, attention=engine.attention)
    finally:
        # Tensors without data would fail whatever program this process runs next.
        twin = engine = None
        gc.collect()


def _hollow(module: nn.Module) -> nn.Module:
    """A copy on the meta device; what shares a tensor shares it there."""
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
    """Generators go on as if nothing had been traced."""
    devices, host = runtime.generator_state(), torch.get_rng_state()
    try:
        yield
    finally:
        runtime.seed(devices)
        torch.set_rng_state(host)
