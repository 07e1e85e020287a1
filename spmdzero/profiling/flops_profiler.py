"""Counts operations by module in the compiled program, under DeepSpeed's names."""

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmdzero._display import Shown
from spmdzero.backend import map_tensors, programs, runtime
from spmdzero.engine import Engine, StepGraph
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.hlo import read_matmuls
from spmdzero.profiling._modules import ModelProfile, ModuleProfile, module_scopes

__all__ = [
    "FlopsProfiler",
    "ModelProfile",
    "ModuleProfile",
    "ProfileReport",
    "get_model_profile",
    "human",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileReport(Shown):
    """A profile in DeepSpeed's arrangement (profiling/flops_profiler/profiler.py).

    Attributes:
        profile: the numbers by module.
        facts: lines of the summary that are not in the program, such as world sizes.
        module_depth: number of levels to aggregate, -1 for all.
        top_modules: number of classes to name at each level.
        detailed: whether each module is listed.
    """

    profile: ModelProfile
    facts: dict[str, str]
    module_depth: int
    top_modules: int
    detailed: bool

    def write(self, output_file: str | None) -> None:
        """Prints the report, or writes it to a file and makes the file's folder."""
        if not output_file:
            print(self)
            return
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{self}\n")


def human(value: float, unit: str = "") -> str:
    """A number with two decimals and a decimal prefix: ``1.23 G``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value:g} {unit}".rstrip()


class FlopsProfiler:
    """Counts the operations of the next step, from the program that XLA compiles for it.

    Call `start_profile` before a step's first forward, train the step, then read. The numbers are
    those of the step's last micro-batch on one device. There are no latencies: the compiler fuses
    modules into each other, and the program runs as a whole.

    Args:
        model: the module that the engine trains.
        ds_engine: the engine.
        recompute_fwd_factor: has no effect, as recomputation is counted in the program.

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
        """Watches the steps from now to `stop_profile`; the first step is compiled once more."""
        self.reset_profile()
        self._watching.enter_context(module_scopes(self.model))
        self._watching.enter_context(self._engine.observe(self._read))

    def stop_profile(self) -> None:
        """Ends the watch, and keeps the numbers."""
        self._watching.close()

    def reset_profile(self) -> None:
        """Forgets the numbers."""
        self._profile = None

    def end_profile(self) -> None:
        """Ends the watch and forgets the numbers."""
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
        """Multiply-accumulate operations of the forward of one micro-batch on one device."""
        return human(self.profile.macs, "MACs") if as_string else self.profile.macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Number of elements of all parameters."""
        return human(self.profile.params) if as_string else self.profile.params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints a `ProfileReport`, which names `profile_step`, or writes it to `output_file`."""
        facts = {
            "profile step:": str(profile_step),
            "data parallel size:": str(self._engine.dp_world_size),
            "batch size per GPU:": str(self._engine.train_micro_batch_size_per_gpu()),
        }
        report = ProfileReport(
            profile=self.profile,
            facts=facts,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )
        report.write(output_file)

    def _read(self, graph: StepGraph) -> None:
        if graph.kind == "boundary" and self._profile is None:
            self._profile = ModelProfile.of(self.model, read_matmuls(graph.hlo()))


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Operations, multiply-accumulates and parameters of one forward, which is compiled, not run.

    It has DeepSpeed's signature. The model is copied, and is not changed.

    Args:
        model: any module.
        input_shape: shape of the only input, which is then all ones.
        args, kwargs: the inputs, if `input_shape` is None.
        print_profile: whether to print the report, or write it to `output_file`.
        detailed, module_depth, top_modules: as in `ProfileReport`.
        warm_up, ignore_modules: have no effect, as nothing is run or timed.
        as_string: whether to return strings such as ``"1.23 G"``.
        mode: "forward".

    Raises:
        SpmdZeroUsageError: a mode other than "forward", or neither a shape nor inputs.
    """
    if mode != "forward":
        raise SpmdZeroUsageError(
            f"get_model_profile(mode={mode!r}): a generation is as many programs as it has "
            'lengths; profile one forward, mode="forward"'
        )
    inputs = (torch.ones(input_shape),) if input_shape is not None else tuple(args)
    if not inputs and not kwargs:
        raise SpmdZeroUsageError("get_model_profile needs input_shape=, args= or kwargs=")
    profile = _profile(model, inputs, kwargs or {})
    if print_profile:
        report = ProfileReport(
            profile=profile,
            facts={},
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )
        report.write(output_file)
    totals = profile.flops, profile.macs, profile.params
    if not as_string:
        return totals
    return human(totals[0]), human(totals[1], "MACs"), human(totals[2])


def _profile(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelProfile:
    runtime.start()
    device = runtime.device()
    twin = copy.deepcopy(model).to(device)
    args, kwargs = map_tensors((args, kwargs), lambda _, tensor: tensor.to(device))
    programs.record_scopes(True, by=twin)
    try:
        with torch.no_grad(), module_scopes(twin):
            result = twin(*args, **kwargs)
        outputs: list[torch.Tensor] = []
        map_tensors(result, lambda _, tensor: outputs.append(tensor) or tensor)
        return ModelProfile.of(twin, read_matmuls(programs.optimized_hlo(outputs)))
    finally:
        programs.record_scopes(False, by=twin)
