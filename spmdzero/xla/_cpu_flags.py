"""XNNPACK stays out of programs for the CPU: on some processors its matrix products are wrong."""

import functools
import logging
import os

from spmdzero.xla import _private
from spmdzero.xla._environment import environment_variable

_VARIABLE = "XLA_FLAGS"
_FLAG = "xla_cpu_use_xnnpack"
# What XLA was started with here; None where it was not started here.
_started_with: str | None = None


def start_without_xnnpack() -> None:
    """Starts XLA on the CPU with that flag, unless XLA_FLAGS says something of it already.

    Measured on an AMD EPYC (family 25, model 1) with torch_xla 2.9 and jaxlib 0.7.1: from the
    second run of a program on, gradients of a GPT of 10 M parameters were wrong, and others in each
    run, also in plain JAX; with the flag off they were DeepSpeed's, the same in each run.

    XLA reads its flags when the client of the devices is made and never again. So the variable is
    as the user left it before and after: child processes inherit it, whatever XLA they have.
    """
    global _started_with
    wanted = with_xnnpack_off(os.environ.get(_VARIABLE, ""))
    if os.environ.get("PJRT_DEVICE") != "CPU" or wanted is None or _started_with is not None:
        return
    if _private.runtime_has_started():
        _say_too_late()
        return
    with environment_variable(_VARIABLE, wanted):
        _private.start_runtime()
    _started_with = wanted


def with_xnnpack_off(given: str) -> str | None:
    """Flags with that one added; None where they say something of it already."""
    return None if _FLAG in given else f"{given} --{_FLAG}=false".strip()


def in_force() -> list[str]:
    """The flags that XLA was started with, or will be where it hasn't started."""
    given = os.environ.get(_VARIABLE, "") if _started_with is None else _started_with
    return given.split()


@functools.cache
def _say_too_late() -> None:
    logging.getLogger("spmdzero").warning(
        "a device was used before spmdzero.initialize, so XLA may use XNNPACK, whose matrix "
        "products are wrong on some processors: set XLA_FLAGS=--%s=false",
        _FLAG,
    )
