"""A step that is traced for a TPU now and compiled later, maybe by another thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from spmdzero.backend import on_torus
from spmdzero.engine import Engine
from spmdzero.explain._aot import compile_for_tpu
from spmdzero.explain._chips import Topology
from spmdzero.explain._explain import explain_traced
from spmdzero.explain._explanation import Explanation
from spmdzero.explain._flags import flags_on
from spmdzero.explain._trace import Batch, TracedProgram
from spmdzero.explain._twin import on_hollow
from spmdzero.explain._without_data import trace_without_data, with_values


@dataclass(frozen=True, kw_only=True)
class StepAhead:
    """A step of a model without data, traced for a topology.

    Attributes:
        engine: which trains nothing.
        programs: of one step.
        topology: the chips.
        batch: the inputs of one forward.
    """

    engine: Engine
    programs: tuple[TracedProgram, ...]
    topology: Topology
    batch: Batch

    def compile(self) -> None:
        """Compiles the programs, which `keeping_programs` has to be on for: there they are kept.

        Another thread may trace meanwhile.

        Raises:
            SpmdZeroRuntimeError: libtpu is missing, or the compiler failed.
        """
        flags = flags_on(self.topology, self.engine.spmd_config.spmd.xla_flags)
        for program in self.programs:
            assert program.annotated is not None
            compile_for_tpu(program.annotated, self.topology, flags=flags)

    def explained(self) -> Explanation:
        """The step's explanation; what `compile` has compiled isn't compiled again.

        Raises:
            SpmdZeroRuntimeError: libtpu is missing, or the compiler failed.
        """
        return explain_traced(self.engine, self.programs, self.topology, self.batch, quietly=True)


def trace_ahead(
    model: nn.Module, config: Mapping[str, Any], batch: Batch, topology: Topology
) -> StepAhead:
    """Traces a step of a config for a topology of as many devices as this process has.

    Args:
        model: on the CPU or the meta device; it stays as it is.
        config: a DeepSpeed JSON as a dict, without "auto".
        batch: the inputs of one forward, with the rows of a micro-batch of all devices.
        topology: the chips.

    Raises:
        SpmdZeroError: the config is refused, or the step can't be traced without data.
    """
    batch = with_values(batch)

    def traced(engine: Engine) -> StepAhead:
        programs = trace_without_data(engine, batch)
        return StepAhead(engine=engine, programs=programs, topology=topology, batch=batch)

    with on_torus(topology.torus_to_trace):
        return on_hollow(model, config, traced, platform="TPU")
