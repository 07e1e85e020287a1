"""The profile of an engine's step, by the calls of DeepSpeed's FlopsProfiler."""

import contextlib
from pathlib import Path

from torch import nn

from spmdzero.engine import Engine, StepGraph
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect import read_matmuls
from spmdzero.profiling.flops_profiler._profile import ModelProfile
from spmdzero.profiling.flops_profiler._scopes import module_scopes
from spmdzero.show._flops import human


class FlopsProfiler:
    """Counts the operations of the next step, from the program that XLA compiles for it.

    Call `start_profile` before a step's first forward, train the step, then read. The numbers are
    those of its last micro-batch on one device. There are no latencies: the compiler fuses modules
    into each other, and the program runs as a whole.

    Args:
        model: the module that the engine trains.
        ds_engine: the engine.
        recompute_fwd_factor: not needed, what backward recomputes is counted in the program.

    Raises:
        SpmdZeroUsageError: there is no engine.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_engine: Engine | None = None,
        recompute_fwd_factor: float = 0.0,
    ) -> None:
        if ds_engine is None:
            raise SpmdZeroUsageError(
                "FlopsProfiler reads the program of an engine's step: pass ds_engine=engine, or "
                "use get_model_profile(model, ...) for a forward alone"
            )
        self.model, self._engine = model, ds_engine
        self._watching = contextlib.ExitStack()
        self._profile: ModelProfile | None = None

    def start_profile(self, ignore_list: None = None) -> None:
        """Watches the steps from here to `stop_profile`; the first is compiled once more."""
        self.reset_profile()
        self._watching.enter_context(module_scopes(self.model))
        self._watching.enter_context(self._engine.observe(self._read))

    def stop_profile(self) -> None:
        """Ends the watch, and keeps what was read."""
        self._watching.close()

    def reset_profile(self) -> None:
        """Forgets what was read."""
        self._profile = None

    def end_profile(self) -> None:
        """Ends the watch and forgets what was read."""
        self.stop_profile()
        self.reset_profile()

    @property
    def profile(self) -> ModelProfile:
        """The numbers by module.

        Raises:
            SpmdZeroUsageError: no step ended while watching.
        """
        if self._profile is None:
            raise SpmdZeroUsageError(
                "no step was profiled: call start_profile() before a step's first forward, then "
                "train up to engine.step() at its boundary before reading"
            )
        return self._profile

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Operations of the forward of one micro-batch on one device."""
        return human(self.profile.flops) if as_string else self.profile.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulate operations of the same."""
        return human(self.profile.macs, "MACs") if as_string else self.profile.macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of all parameters."""
        return human(self.profile.params) if as_string else self.profile.params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the report, or writes it to `output_file`.

        Args:
            profile_step: the step to name in the report.
            module_depth: how many levels to aggregate, -1 for all.
            top_modules: classes to name at each level.
            detailed: whether each module is listed.
            output_file: a path, whose folder is made; None prints.
        """
        engine = self._engine
        facts = {
            "profile step:": str(profile_step),
            "data parallel size:": str(engine.dp_world_size),
            "batch size per GPU:": str(engine.train_micro_batch_size_per_gpu()),
        }
        write_report(
            self.profile.text(
                facts=facts, module_depth=module_depth, top_modules=top_modules, detailed=detailed
            ),
            output_file,
        )

    def _read(self, graph: StepGraph) -> None:
        if graph.kind == "boundary" and self._profile is None:
            self._profile = ModelProfile.of(self.model, read_matmuls(graph.hlo()))


def write_report(text: str, output_file: str | None) -> None:
    """Prints a report, or writes it to a file whose folder is made."""
    if not output_file:
        print(text)
        return
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
