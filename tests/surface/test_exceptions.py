"""What DeepSpeed refuses by an `assert` or Python's own types is caught here by the same types."""

import builtins
import json
from pathlib import Path

import spmdzero
from tests.surface.calls_that_raise import Calls, raised

# From real DeepSpeed 0.19.8, by tests/surface/record_exceptions.py.
RECORDED = json.loads(
    (Path(__file__).parents[1] / "data" / "deepspeed_exceptions.json").read_text()
)


def test_who_catches_deepspeeds_exception_catches_ours() -> None:
    calls = Calls(spmdzero, spmdzero.runtime.lr_schedules).all()
    assert calls.keys() == RECORDED.keys()
    differing = {}
    for name, call in calls.items():
        kind = raised(call)
        wanted = (getattr(builtins, RECORDED[name]), spmdzero.SpmdZeroError)
        if kind is None or not all(issubclass(kind, base) for base in wanted):
            differing[name] = (RECORDED[name], kind)
    assert differing == {}
