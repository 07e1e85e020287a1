"""XNNPACK stays out of programs for the CPU: on some processors its matrix products are wrong."""

import functools
import logging
import os

from spmdzero.xla import _private

_FLAG = "xla_cpu_use_xnnpack"


def leave_xnnpack_out() -> None:
    """Tells XLA's CPU compiler so, unless XLA_FLAGS says something of it already.

    Measured on an AMD EPYC (family 25, model 1) with torch_xla 2.9 and jaxlib 0.7.1: from the
    second run of a program on, gradients of a GPT of 10 M parameters were wrong, and others in each
    run, also in plain JAX; with the flag off they were DeepSpeed's, the same in each run.
    Called on import already, because any use of a device has XLA read its flags.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("PJRT_DEVICE") != "CPU" or _FLAG in given:
        return
    if _private.runtime_has_started():
        _say_too_late()
        return
    os.environ["XLA_FLAGS"] = f"{given} --{_FLAG}=false".strip()


@functools.cache
def _say_too_late() -> None:
    logging.getLogger("spmdzero").warning(
        "a device was used before spmdzero was imported, so XLA may use XNNPACK, whose matrix "
        "products are wrong on some processors: set XLA_FLAGS=--%s=false",
        _FLAG,
    )
