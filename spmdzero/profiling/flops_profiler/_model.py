"""The profile of a model's forward, without an engine."""

import copy
from typing import Any

import torch
from torch import nn

from spmdzero.backend import map_tensors, programs, runtime
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect import read_matmuls
from spmdzero.profiling.flops_profiler._profile import ModelProfile
from spmdzero.profiling.flops_profiler._profiler import write_report
from spmdzero.profiling.flops_profiler._scopes import module_scopes
from spmdzero.show._flops import human


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
    """Operations, multiply-accumulates and parameters of one forward, compiled and not run.

    DeepSpeed's signature. The model is copied; it stays where and as it is.

    Args:
        model: any module.
        input_shape: shape of the one input, which is then all ones.
        args, kwargs: the inputs, where there is no `input_shape`.
        print_profile: whether to print the report, or write it to `output_file`.
        detailed, module_depth, top_modules, output_file: as in
            `FlopsProfiler.print_model_profile`.
        warm_up, ignore_modules: without meaning, nothing is run or timed.
        as_string: whether to return strings such as ``"1.23 G"``.
        mode: "forward".

    Raises:
        SpmdZeroUsageError: another mode, or neither a shape nor inputs.
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
        text = profile.text(
            facts={}, module_depth=module_depth, top_modules=top_modules, detailed=detailed
        )
        write_report(text, output_file)
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

        def collect(_: str, tensor: torch.Tensor) -> torch.Tensor:
            outputs.append(tensor)
            return tensor

        map_tensors(result, collect)
        return ModelProfile.of(twin, read_matmuls(programs.optimized_hlo(outputs)))
    finally:
        programs.record_scopes(False, by=twin)
