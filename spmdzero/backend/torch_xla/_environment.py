"""What this process finds around it before torch_xla is imported: chips, and variables."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Inside, the variable has that value. Child processes, which inherit it, start outside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def has_tpu_chips() -> bool:
    """Whether the kernel shows TPU chips."""
    return os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
