"""`spmdzero.initialize`: an engine, and what profiles, audits and explains it."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from spmdzero import engine, profiling
from spmdzero.audit import audit, doctor
from spmdzero.explain import explain_engine

_Arguments = ParamSpec("_Arguments")
_Made = TypeVar("_Made", bound=tuple[engine.Engine, Any, Any, Any])


def _profiled(make: Callable[_Arguments, _Made]) -> Callable[_Arguments, _Made]:
    # Profilers, audits and explanations read engines, so the engine can't know them.
    @functools.wraps(make)
    def initialize(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Made:
        made = make(*args, **kwargs)
        profiling.attach(made[0])
        made[0].audit = functools.partial(audit, made[0])
        made[0].doctor = functools.partial(doctor, made[0])
        made[0].explain = functools.partial(explain_engine, made[0])
        return made

    return initialize


initialize = _profiled(engine.initialize)
