"""Compiled programs on disk, for platforms whose programs can be read back."""

import os

import torch_xla.runtime as xr

from spmdzero._logging import log_once
from spmdzero.backend.torch_xla import _private
from spmdzero.errors import SpmdZeroRuntimeError

_VARIABLE = "XLA_PERSISTENT_CACHE_PATH"


def use(path: str) -> None:
    """Keeps compiled programs in the folder `path`; an empty path changes nothing.

    A later process that traces the same programs reads them from there. Each process of several
    needs its own folder or one that all of them may write to. On the CPU it has no effect, and
    says so once: torch_xla 2.9 writes the programs there, but can't read them back.

    Raises:
        SpmdZeroRuntimeError: a program was compiled before, without this cache.
    """
    if not path:
        return
    if xr.device_type() == "CPU":
        log_once(
            f'"spmd": {{"compile_cache": "{path}"}} has no effect on the CPU: torch_xla can\'t '
            "read compiled CPU programs back, so each process compiles anew"
        )
    elif os.environ.get(_VARIABLE) != path:
        if _private.has_compiled():
            raise SpmdZeroRuntimeError(
                f'"spmd": {{"compile_cache": "{path}"}} comes too late: programs were compiled '
                "before. Call spmdzero.initialize before a device is used, or start the program "
                f"with {_VARIABLE}='{path}'"
            )
        xr.initialize_cache(path)
