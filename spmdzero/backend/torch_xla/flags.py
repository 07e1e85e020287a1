"""Passing the TPU compiler's flags to libtpu by the environment, before it starts."""

import os
from collections.abc import Mapping

from spmdzero._logging import log_once
from spmdzero.backend.chips._chips import tpu_generation
from spmdzero.backend.chips._flag_sets import (
    ALWAYS,
    FLAG_SETS,
    VARIABLE,
    flags_of,
    given_to_libtpu,
    no_effect_here,
)
from spmdzero.backend.chips._flag_sets import given_to_libtpu as in_force
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._cpu_flags import in_force as cpu_flags
from spmdzero.backend.torch_xla.compile_cache import use as use_cache
from spmdzero.errors import SpmdZeroRuntimeError

__all__ = [
    "ALWAYS",
    "DEBUGGING",
    "FLAG_SETS",
    "apply",
    "cpu_flags",
    "flags_for",
    "in_force",
    "use_cache",
]

DEBUGGING: tuple[str, ...] = (
    "PT_XLA_DEBUG_LEVEL",
    "XLA_SAVE_TENSORS_FILE",
    "XLA_DUMP_HLO_GRAPH",
    "XLA_IR_DEBUG",
)


def flags_for(name: str, *, chip: str | None = None) -> Mapping[str, str]:
    """The flags of a set, see `flags_of`; ``"auto"`` takes those of this machine's chip.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    return flags_of(name, chip=chip or (tpu_generation() if _on_tpu() else None))


def apply(name: str) -> None:
    """Hands a set of flags to libtpu; the environment's flags win.

    Raises:
        SpmdZeroUsageError: there is no such set.
        SpmdZeroRuntimeError: the TPU client has started with other flags, which it reads once.
    """
    wanted = flags_for(name)
    missing = {key: value for key, value in wanted.items() if key not in given_to_libtpu()}
    if not missing:
        return
    if not _on_tpu():
        log_once(no_effect_here(name))
    elif _private.runtime_has_started():
        raise SpmdZeroRuntimeError(
            f'"spmd": {{"xla_flags": "{name}"}} comes too late: the TPU runtime has started '
            f"without {', '.join(missing)}. Call spmdzero.initialize before a device is used, or "
            f"start the program with {VARIABLE}='{_written(missing)}'"
        )
    else:
        given = os.environ.get(VARIABLE, "")
        os.environ[VARIABLE] = f"{given} {_written(missing)}".strip()


def _written(flags: Mapping[str, str]) -> str:
    return " ".join(f"--{name}={value}" for name, value in flags.items())


def _on_tpu() -> bool:
    return os.environ.get("PJRT_DEVICE", "").upper() == "TPU"
