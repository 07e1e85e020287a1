"""Starts the profiles that the config asks for."""

import functools
import logging

from spmdzero.backend import runtime
from spmdzero.engine import Engine
from spmdzero.inspect import measure
from spmdzero.profiling import comms
from spmdzero.profiling.flops_profiler import FlopsProfiler

logger = logging.getLogger("spmdzero")


def attach(engine: Engine) -> None:
    """Makes an engine profile itself: `flops_profiler`, `comms_logger`, `memory_breakdown`."""
    config = engine.spmd_config
    if runtime.process_index() != 0:
        return
    if config.flops_profiler.enabled:
        engine.after_step.append(_OneStep(engine))
    if config.comms_logger.enabled:
        engine.after_step.append(functools.partial(comms.Recorder(engine), engine))
    if config.memory_breakdown:
        engine.after_step.append(functools.partial(_log_memory, engine))


class _OneStep:
    """Profiles the step that begins at ``global_steps == profile_step``, as in DeepSpeed."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._settings = engine, engine.spmd_config.flops_profiler
        engine.flops_profiler = self._profiler = FlopsProfiler(engine.module, engine)
        self._profiling = False
        self._start_at_its_step()

    def __call__(self) -> None:
        if self._profiling:
            self._profiler.print_model_profile(
                profile_step=self._engine.global_steps,
                module_depth=self._settings.module_depth,
                top_modules=self._settings.top_modules,
                detailed=self._settings.detailed,
                output_file=self._settings.output_file,
            )
            # The numbers stay available in `engine.flops_profiler`.
            self._profiler.stop_profile()
            self._profiling = False
        self._start_at_its_step()

    def _start_at_its_step(self) -> None:
        engine = self._engine
        if engine.global_steps == self._settings.profile_step:
            self._profiling = True
            self._profiler.start_profile()


def _log_memory(engine: Engine) -> None:
    if engine.global_steps % (engine.steps_per_print() or 1) == 0:
        line = "step=%d, live tensors of the engine, bytes per device: %s"
        logger.info(line, engine.global_steps, measure(engine))
