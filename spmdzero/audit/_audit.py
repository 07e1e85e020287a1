"""Watches steps of training, and reports their faults."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from spmdzero.audit import _live_tensors
from spmdzero.audit._collectives import ReadProgram
from spmdzero.audit._host_reads import HostWatch
from spmdzero.audit._loss_scale import loss_scale, summed_outside
from spmdzero.audit._recompiles import recompilations
from spmdzero.audit._report import AuditReport, Finding, sorted_findings
from spmdzero.backend import arrays, runtime
from spmdzero.engine import Engine, RepeatedRows, StepGraph
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.profiling import module_scopes

_NAMES = ("world_size", "process_count", "num_processes", "n_gpu", "num_gpus", "num_replicas")


def world_size_of_hosts(module: nn.Module, *, hosts: int, devices: int) -> list[Finding]:
    """Findings about attributes of submodules that hold the number of hosts, and not of devices.

    Args:
        module: the trained module.
        hosts, devices: their numbers.
    """
    return [
        Finding(
            name="world-size-of-hosts",
            severity="warning",
            subject=f"the attribute {f'{prefix}.{name}'.lstrip('.')!r} of the model",
            cause=f"it is {hosts}, the number of hosts, as torch.distributed answers outside of a "
            f"forward, and {devices} devices train: a gather behind `if world_size > 1` is left "
            "out, and each device's loss sees its own rows alone",
            fix="ask torch.distributed.get_world_size() in the forward, where it is the number of "
            "devices, and get_rank() too",
            evidence=f"{name} = {hosts}",
        )
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name.lstrip("_") in _NAMES and type(value) is int and value == hosts != devices
    ]


class Audit:
    """An audit under way, which `auditing` yields.

    Attributes:
        report: the findings, after the block has ended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._texts: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._before = tuple(engine.programs.compilations)
        self._first_step = engine.global_steps
        self._memory = self._of_states()
        self._replaced: set[str] = set()
        self._rows: RepeatedRows | None = None
        self._summed: str | None = None
        self.watch = HostWatch(engine.module)
        self._report: AuditReport | None = None

    @property
    def report(self) -> AuditReport:
        """The findings.

        Raises:
            SpmdZeroUsageError: the block has not ended.
        """
        if self._report is None:
            raise SpmdZeroUsageError(
                "the audit is not over: read its report after the `with spmdzero.auditing(engine)`"
            )
        return self._report

    def read(self, graph: StepGraph) -> None:
        """Looks at a program that is about to run."""
        for name, tensor in _live_tensors.states(self._engine).items():
            if name in self._memory and arrays.is_kept_beside(self._memory[name], tensor):
                self._replaced.add(name)
        self._memory = self._of_states()
        self._rows = graph.rows or self._rows
        self._summed = graph.summed or self._summed
        if graph.kind not in self._texts:
            self._texts[graph.kind] = graph.hlo(), graph.returned

    def _of_states(self) -> dict[str, Any]:
        states = _live_tensors.states(self._engine)
        return {name: arrays.memory_of(tensor) for name, tensor in states.items()}

    def finish(self) -> None:
        """Makes the report.

        Raises:
            SpmdZeroUsageError: no step was trained.
        """
        engine = self._engine
        if not self._texts:
            raise SpmdZeroUsageError(
                "the audit saw no step: train two or more inside of spmdzero.auditing(engine)"
            )
        # Tensors that the script left pending would otherwise have no shards.
        runtime.sync()
        steps = engine.global_steps - self._first_step
        dtypes = {
            name: str(parameter.dtype).removeprefix("torch.")
            for name, parameter in engine.module.named_parameters()
        }
        findings, inputs = list[Finding](), 0
        for kind, (text, outputs) in self._texts.items():
            program = ReadProgram(text, outputs=outputs, **engine.mesh.spec.sharing)
            findings += program.findings(
                dtypes=dtypes,
                where=f"{kind} program",
                communicate=engine.spmd_config.reduction_data_type,
            )
            inputs = program.ledger.parameters
        findings += _live_tensors.replicated_states(engine)
        findings += _live_tensors.drifted_parameters(engine)
        findings += _live_tensors.missing_donation(
            self._replaced, len(self._memory), engine.donated_inputs, inputs
        )
        earlier = {id(compilation) for compilation in self._before}
        since = [c for c in engine.programs.compilations if id(c) not in earlier]
        findings += recompilations(since, before=self._before)
        findings += self.watch.findings(steps=steps)
        if engine.mesh.replicas > 1:
            findings += world_size_of_hosts(
                engine.module, hosts=runtime.process_count(), devices=engine.mesh.replicas
            )
            findings += loss_scale(self._rows, devices=engine.mesh.replicas)
            findings += summed_outside(self._summed, devices=engine.mesh.replicas)
        self._report = AuditReport(
            findings=sorted_findings(findings), steps=steps, programs=tuple(self._texts)
        )


@contextlib.contextmanager
def auditing(engine: Engine) -> Iterator[Audit]:
    """Audits the steps that the block trains; read `report` after it.

    Each kind of program is compiled once more for its text. The training itself is not changed. Two
    steps or more show changes from one step to the next.

    Raises:
        SpmdZeroUsageError: the block trained no step.
    """
    audit = Audit(engine)
    with module_scopes(engine.module), engine.observe(audit.read), audit.watch:
        yield audit
    audit.finish()


def audit(engine: Engine, batches: Iterable[Any]) -> AuditReport:
    """Trains on `batches` and reports faults; three steps or more show everything.

    Args:
        engine: an engine, which trains as usual: parameters and counters change.
        batches: batches for `engine.train_batch`, `gradient_accumulation_steps` for each step. The
            module must return the loss; use `auditing` around any other loop.

    Raises:
        SpmdZeroUsageError: the batches don't make whole steps, or `train_batch` refuses them.
    """
    micro_batches = list(batches)
    size = engine.gradient_accumulation_steps()
    if not micro_batches or len(micro_batches) % size:
        raise SpmdZeroUsageError(
            f"audit was given {len(micro_batches)} micro-batches, a step takes {size}: give "
            "whole steps, three or more"
        )
    data = iter(micro_batches)
    with auditing(engine) as watched:
        for _ in range(len(micro_batches) // size):
            engine.train_batch(data)
    return watched.report
