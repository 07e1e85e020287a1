"""Explaining a model under a config, or a live engine."""

import contextlib
import copy
import dataclasses
import gc
import inspect
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from spmdzero.audit import AuditReport, sorted_findings
from spmdzero.backend import current, map_tensors, on_torus, runtime, tracing_only
from spmdzero.backend.replica._candidates import candidates
from spmdzero.config import SpmdZeroConfig
from spmdzero.engine import Engine, initialize
from spmdzero.engine._low_precision import require_gain
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain import _calibration, _passes
from spmdzero.explain._aot import require_tpu_compiler
from spmdzero.explain._attention import attention_uses
from spmdzero.explain._chips import Topology
from spmdzero.explain._explanation import Explanation
from spmdzero.explain._fit import fit_of_stages
from spmdzero.explain._flags import flags_in_words
from spmdzero.explain._progress import Step, shown
from spmdzero.explain._recompute import with_policy
from spmdzero.explain._settings import settings_of
from spmdzero.explain._targets import Target, compile_on, rooflines
from spmdzero.explain._trace import Batch, TracedProgram, trace_audited, trace_step
from spmdzero.explain._twin import ForTpu, engine_for_tpu, on_each_torus, traced_for_tpu, twin_or
from spmdzero.explain._verdict import verdicts
from spmdzero.explain._without_data import (
    bring_to_devices,
    check_runs_here,
    is_without_data,
    trace_without_data,
    with_values,
)
from spmdzero.plan import Role, ShardingPlan

logger = logging.getLogger("spmdzero")

# From this many equal blocks on, compiling them one by one takes minutes, where a loop takes one.
_MANY_BLOCKS = 8
# Number of audited steps: changes between steps, such as a recompilation, show from the second on.
_AUDITED_STEPS = 3


def explain(
    model: nn.Module,
    config: str | os.PathLike[str] | dict[str, Any],
    batch: Batch,
    *,
    tpu: Iterable[str] = (),
    stages: Sequence[int] = (0, 1, 2),
    host_rate: float | None = None,
) -> Explanation:
    """Explains whether a step fits, its traffic, its faults, its limits, and its time.

    A copy of the model trains a step at each of the stages (three steps at the config's stage, for
    the audit), on this process's devices, for example 8 virtual ones on the CPU by
    ``CPU_NUM_DEVICES=8``. `model` stays as it is. A model on the meta device is only traced and
    compiled for TPUs, and takes no memory; faults that only a run shows are not audited then.

    Args:
        model: a module that returns its loss, on the CPU or on the meta device.
        config: path of a DeepSpeed JSON, or its dict. "auto" is read as the batch's number, the
            key's default, or a number that changes no program; see `Explanation.notes`.
        batch: the inputs of one forward: a tensor, a tuple of inputs or a dict of keyword inputs,
            with the rows of a micro-batch of all devices. On the meta device floats become normal
            draws, everything else zeros.
        tpu: topologies such as ``"v5e:2x4"`` of as many devices as this process has; they need the
            JAX backend and ``jax[tpu]``, but no TPU.
        stages: stages to compile, besides the config's. The others are planned.
        host_rate: bytes per second each way between a TPU and its host's memory; None for the
            figure of its generation, of which the maker publishes none.

    Raises:
        SpmdZeroUsageError: a topology that is unknown, or has a different number of devices, or
            is asked for with torch_xla; a model on the meta device without a topology; more devices
            than a CPU can have; a `host_rate` that is no rate.
        SpmdZeroRuntimeError: libtpu is missing, or the compiler failed.
        SpmdZeroError: as in `initialize`.
    """
    batch = with_values(batch)
    settings, notes = settings_of(config, batch)
    topologies = _topologies(tpu, host_rate)
    require_gain(settings, [topology.chip.name for topology in topologies])
    check_runs_here(model, named=bool(topologies))
    settings, picked = with_policy(settings, model, batch, topologies)
    if topologies and settings.spmd.scan == "off" and _passes.is_first():
        _name_the_loop(model)
    own = settings.zero_optimization.stage
    order = (own, *sorted(set(stages) - {own}))
    compiled: dict[int, list[Target]] = {}
    with shown(len(order) + len(order) * _programs(settings) * len(topologies)) as step:

        def traced(stage: int) -> _Traced:
            found = _traced(model, settings.source, stage, batch, step, audits=stage == own,
                            topologies=topologies)  # fmt: skip
            compiled[stage] = found.compiled_on(topologies, step)
            return found

        found = traced(own)
        for stage in order[1:]:
            traced(stage)
    explanation = _put_together(found, compiled, batch, topologies, notes + picked)
    # Tensors without data would make the next program of this process fail.
    del found
    gc.collect()
    return explanation


def explain_engine(
    engine: Engine, *inputs: Any, tpu: Iterable[str] = (), **named: Any
) -> Explanation:
    """Explains whether this engine's step fits, its traffic, its faults, and its time.

    It trains one step: `gradient_accumulation_steps` micro-batches of these inputs. Only the
    engine's own stage is compiled; `spmdzero.explain` compiles others too and doesn't train the
    model. `engine.audit` shows changes from step to step.

    Args:
        inputs, named: the module's inputs, as `engine(...)` takes them; the module returns its
            loss.
        tpu: as in `explain`.

    Raises:
        SpmdZeroUsageError: a topology that is unknown, or has a different number of devices.
        SpmdZeroRuntimeError: libtpu is missing, or the compiler failed.
    """
    if inputs and named:
        bound = inspect.signature(engine.module.forward).bind(*inputs, **named)
        inputs, named = (), dict(bound.arguments)
    batch = named or inputs
    topologies, settings = _topologies(tpu), engine.spmd_config
    with shown(1 + _programs(settings) * len(topologies)) as step:
        with step(f"stage {engine.plan.stage}, tracing"):
            programs, audit = trace_audited(engine, batch, steps=1, counts=bool(topologies))
            for_tpu = on_each_torus(
                topologies, lambda: twin_or(programs, lambda: engine_for_tpu(engine, batch))
            )
        found = _Traced(engine=engine, programs=programs, audit=audit, for_tpu=for_tpu)
        own = found.compiled_on(topologies, step)
    return _put_together(found, {engine.plan.stage: own}, batch, topologies)


def explain_traced(
    engine: Engine,
    programs: tuple[TracedProgram, ...],
    topology: Topology,
    batch: Batch,
    *,
    quietly: bool = False,
) -> Explanation:
    """Explains a step of an engine that trains nothing: its programs, traced for a TPU.

    Args:
        engine: the engine.
        programs: of one step, traced for `topology`.
        topology: the chips.
        batch: the inputs of a forward.
        quietly: whether no progress is shown, as of programs that are known already.

    Raises:
        SpmdZeroRuntimeError: libtpu is missing, or the compiler failed.
    """
    audit = AuditReport(findings=(), steps=0, programs=())
    there = {topology.name: ForTpu(programs=programs, attention=engine.attention)}
    found = _Traced(engine=engine, programs=programs, audit=audit, for_tpu=there)

    def silent(_: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with contextlib.nullcontext(silent) if quietly else shown(len(programs)) as step:
        own = found.compiled_on([topology], step)
    return _put_together(found, {engine.plan.stage: own}, batch, [topology])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """A traced step: engine, programs on this process's devices, programs for each topology."""

    engine: Engine
    programs: tuple[TracedProgram, ...]
    audit: AuditReport
    for_tpu: Mapping[str, ForTpu]

    def compiled_on(self, topologies: Sequence[Topology], step: Step) -> list[Target]:
        """Compiles the step for each topology, as the config's flags say; see `compile_on`."""
        plan = self.engine.plan
        return compile_on(
            self.programs, topologies, stage=plan.stage, step=step, sharing=plan.mesh.sharing,
            for_tpu={name: there.programs for name, there in self.for_tpu.items()},
            flags=self.engine.spmd_config.spmd.xla_flags,
        )  # fmt: skip

    @property
    def first(self) -> ForTpu:
        """The step on the first topology, which represents all in statements made once."""
        return next(iter(self.for_tpu.values()), ForTpu(programs=self.programs))


def _topologies(names: Iterable[str], host_rate: float | None = None) -> list[Topology]:
    topologies = [Topology.parse(name) for name in names]
    if host_rate is not None:
        if not (topologies and 0 < host_rate < math.inf):
            raise SpmdZeroUsageError(
                f"host_rate={host_rate}: bytes per second between a TPU and its host count in the "
                'time of a step on a TPU: explain(..., tpu=["v5e:2x4"], host_rate=25e9)'
            )
        topologies = [topology.with_host_rate(host_rate) for topology in topologies]
    here = runtime.device_count()
    for topology in topologies:
        if topology.devices != here:
            raise SpmdZeroUsageError(
                f"{topology.name} has {topology.devices} devices and this process {here}. A "
                "program is traced for as many devices as it is compiled for: on the command line "
                f"`spmdzero explain ... --tpu {topology.name}` sees to it, or start Python with "
                f"CPU_NUM_DEVICES={topology.devices} PJRT_DEVICE=CPU"
            )
    if topologies:
        require_tpu_compiler()
        # A file of one's own that can't be read is found out before minutes of compiling.
        _calibration.current()
    return topologies


def _name_the_loop(model: nn.Module) -> None:
    """Logs what shortens the compilation of a model of many equal blocks."""
    rows = Counter(candidate.series for candidate in candidates(model).values())
    most = max(rows.values(), default=0)
    if most >= _MANY_BLOCKS and current().loops:
        logger.info(
            "explain: %d equal blocks are compiled one by one, which takes minutes for large ones. "
            '"spmd": {"scan": "on"} compiles one, as the body of a loop: --set spmd.scan=on',
            most,
        )


def _programs(settings: SpmdZeroConfig) -> int:
    return 2 if (settings.gradient_accumulation_steps or 1) > 1 else 1


def _traced(
    model: nn.Module,
    source: Mapping[str, Any],
    stage: int,
    batch: Batch,
    step: Step,
    *,
    audits: bool,
    topologies: Sequence[Topology],
) -> _Traced:
    section = source.get("zero_optimization", {})
    config = {**source, "zero_optimization": {**section, "stage": stage}}
    audit = AuditReport(findings=(), steps=0, programs=())
    duplicate = copy.deepcopy(model)
    with step(f"stage {stage}, tracing"):
        if is_without_data(model):
            own = topologies[0].torus_to_trace
            with tracing_only(platform="TPU"), on_torus(own):
                bring_to_devices(duplicate)
                engine, *_ = initialize(model=duplicate, config=config)
                programs = trace_without_data(engine, batch)
            there = ForTpu(programs=programs, attention=engine.attention)
            every = on_each_torus(
                topologies, lambda: traced_for_tpu(model, config, batch), known={own: there}
            )
            return _Traced(engine=engine, programs=programs, audit=audit, for_tpu=every)
        engine, *_ = initialize(model=duplicate, config=config)
        if audits:
            programs, audit = trace_audited(
                engine, batch, steps=_AUDITED_STEPS, counts=bool(topologies)
            )
        else:
            programs = trace_step(engine, batch)
        every = on_each_torus(
            topologies, lambda: twin_or(programs, lambda: traced_for_tpu(model, config, batch))
        )
    return _Traced(engine=engine, programs=programs, audit=audit, for_tpu=every)


def _put_together(
    found: _Traced,
    compiled: Mapping[int, Sequence[Target]],
    batch: Batch,
    topologies: Sequence[Topology],
    notes: tuple[str, ...] = (),
) -> Explanation:
    engine, audit = found.engine, found.audit
    plan = engine.plan
    own = [target for target in compiled[plan.stage] if target.compiled]
    accumulation = engine.gradient_accumulation_steps()
    count, counted = _tokens(batch)
    tokens = max(accumulation * count // plan.mesh.size, 1)
    memories = {stage: [t.memory for t in ts] for stage, ts in compiled.items()}
    rows = engine.train_micro_batch_size_per_gpu()
    return Explanation(
        stage=plan.stage,
        mesh=str(plan.mesh),
        devices=plan.mesh.size,
        accumulation=accumulation,
        tokens=tokens,
        counted=counted,
        verdicts=verdicts(plan, memories, topologies, rows=rows),
        model=_in_words(engine.module, plan),
        config=dict(engine.spmd_config.source),
        notes=notes,
        xla_flags=flags_in_words(topologies, engine.spmd_config.spmd.xla_flags),
        fits=fit_of_stages(plan, memories),
        paper_note=plan.compare().paper_note,
        moves=tuple(target.moves(plan) for target in own),
        audit=_with_tpu_findings(audit, engine, own),
        rooflines=tuple(rooflines(plan, own, tokens)),
        attention=attention_uses(found.first.attention),
        tpu_note=found.first.note,
        times=tuple(target.time for target in own if target.topology is not None),
    )


def _with_tpu_findings(
    audit: AuditReport, engine: Engine, targets: Sequence[Target]
) -> AuditReport:
    communicate = engine.spmd_config.reduction_data_type
    dtypes = {tensor.name: tensor.dtype(Role.PARAMETER) for tensor in engine.plan}
    on_tpu = [target for target in targets if target.topology is not None]
    found = [f for t in on_tpu for f in t.findings(dtypes=dtypes, communicate=communicate)]
    return AuditReport(
        findings=sorted_findings([*audit.findings, *found]),
        steps=audit.steps,
        programs=(*audit.programs, *(f"{p.kind} on {t.name}" for t in on_tpu for p in t.programs)),
    )


def _in_words(module: nn.Module, plan: ShardingPlan) -> str:
    parameters = sum(math.prod(tensor.shape) for tensor in plan)
    return f"{type(module).__name__}, {parameters:,} parameters"


def _tokens(batch: Batch) -> tuple[int, Literal["token", "row"]]:
    """Number of positions of the first integer input on all devices, or of rows, with a name."""
    tensors: list[torch.Tensor] = []
    map_tensors(batch, lambda _, tensor: tensors.append(tensor) or tensor)
    first = next((t for t in tensors if not t.is_floating_point() and t.dim() > 1), None)
    if first is not None:
        return first.shape[0] * first.shape[1], "token"
    return tensors[0].shape[0], "row"
