"""Whether the module that an engine trains is still where the engine has put it."""

import contextlib
from collections.abc import Iterator

from spmdzero.backend import arrays
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._training import Training


def require_placed(training: Training) -> None:
    """Returns if the module's parameters are those that its engine trains, on the devices.

    Raises:
        SpmdZeroUsageError: `module.cpu()`, or something like it, has moved one.
    """
    now = dict(training.module.named_parameters())
    for name, parameter in training.parameters:
        if now.get(name) is not parameter or not arrays.is_mine(parameter):
            raise SpmdZeroUsageError(
                f"{name} is not the parameter on the devices any more that this engine trains: the "
                "module was moved, by module.cpu(), module.to(...) or zero_to_fp32. Make a new "
                "engine of it by spmdzero.initialize, and load_checkpoint into that one"
            )


@contextlib.contextmanager
def naming_what_left(training: Training) -> Iterator[None]:
    """Turns what fails inside, where the module is no more on the devices, into that error.

    Raises:
        SpmdZeroUsageError: as `require_placed`.
    """
    try:
        yield
    except Exception:
        require_placed(training)
        raise
