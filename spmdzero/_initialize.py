"""`spmdzero.initialize`: makes an engine with its profiles, audits and explanations."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from spmdzero import engine, profiling
from spmdzero.audit import audit, doctor
from spmdzero.compat.engine import DeepSpeedEngine
from spmdzero.compat.pipe import engine_class_of
from spmdzero.explain import explain_engine, fit_recompute

_Arguments = ParamSpec("_Arguments")

# These functions read engines, so the engine's own files can't import them.
engine.Engine.audit = audit
engine.Engine.doctor = doctor
engine.Engine.explain = explain_engine


def _named_as_deepspeeds(
    make: Callable[_Arguments, tuple[Any, Any, Any, Any]],
) -> Callable[
    _Arguments,
    tuple[DeepSpeedEngine, engine.ZeroOptimizer | None, engine.ZeroDataLoader | None, Any],
]:
    @functools.wraps(make)
    def initialize(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Any:
        model = kwargs["model"] if "model" in kwargs else args[1] if len(args) > 1 else None
        kwargs.setdefault("engine_class", engine_class_of(model))
        made = make(*args, **kwargs)
        profiling.attach(made[0])
        fit_recompute(made[0])
        return made

    return initialize


initialize = _named_as_deepspeeds(engine.initialize)
