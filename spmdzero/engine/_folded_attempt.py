"""One attempt to fold what Python is about to run again, which leaves nothing behind."""

from collections.abc import Callable
from typing import TypeVar

from spmdzero.backend.torch_xla import StandInKeptError, no_stand_in_left
from spmdzero.engine._kinds import NotCapturableError
from spmdzero.engine._module_watch import ModuleWatch
from spmdzero.errors import SpmdZeroError

Traced = TypeVar("Traced")


def attempt(
    trace: Callable[[], Traced], *, watch: ModuleWatch, name: str
) -> Traced | NotCapturableError:
    """What `trace` returns, or why it can't stand for later steps.

    Args:
        trace: folds something.
        watch: the module as it is, and will be again.
        name: of what is folded, in reasons.
    """
    outcome = _try(trace)
    if change := watch.change():
        watch.restore()
        return NotCapturableError(f"the {name} changes the module: {change}")
    return outcome


def _try(trace: Callable[[], Traced]) -> Traced | NotCapturableError:
    try:
        with no_stand_in_left():
            return trace()
    except StandInKeptError:
        return NotCapturableError("the forward keeps a tensor outside of the module")
    except (NotCapturableError, SpmdZeroError, RuntimeError) as error:
        # Not the error itself, whose frames hold what was traced. A real one comes again.
        return NotCapturableError(str(error))
