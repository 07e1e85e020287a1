"""`spmdzero.initialize`: makes an engine with its profiles, audits and explanations."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from spmdzero import engine, profiling
from spmdzero.audit import audit, doctor
from spmdzero.explain import explain_engine, fit_recompute

_Arguments = ParamSpec("_Arguments")
_Made = TypeVar("_Made", bound=tuple[engine.Engine, Any, Any, Any])

# These functions read engines, so the engine's own files can't import them.
engine.Engine.audit = audit
engine.Engine.doctor = doctor
engine.Engine.explain = explain_engine


def _profiled(make: Callable[_Arguments, _Made]) -> Callable[_Arguments, _Made]:
    @functools.wraps(make)
    def initialize(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Made:
        made = make(*args, **kwargs)
        profiling.attach(made[0])
        fit_recompute(made[0])
        return made

    return initialize


initialize = _profiled(engine.initialize)
