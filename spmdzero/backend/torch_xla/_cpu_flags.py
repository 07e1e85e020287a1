"""Flags of XLA on the CPU, without which its numbers differ from torch's."""

import logging
import os

from spmdzero._logging import is_new
from spmdzero.backend._left_variables import take_back
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._environment import environment_variable

_VARIABLE = "XLA_FLAGS"
# Name of a flag -> what is wrong unless it is off, for the warning.
_OFF = {
    # Measured on an AMD EPYC (family 25, model 1) with torch_xla 2.9 and jaxlib 0.7.1: from a
    # program's second run on, gradients of a GPT of 10 M parameters were wrong, differently in each
    # run, also in plain JAX. With the flag off they were DeepSpeed's, the same in each run.
    "xla_cpu_use_xnnpack": "matrix products are wrong on some processors",
    # With it a clamp or max pool turns NaN into a number: a diverged model would look sound.
    "xla_cpu_enable_fast_min_max": "max, min and clamp lose a NaN",
}
# The flags that XLA was started with here; None where it was not started here.
_started_with: str | None = None


def start_as_torch_computes() -> None:
    """Starts XLA on the CPU with these flags, except those that XLA_FLAGS sets.

    XLA reads its flags only when it makes the client of the devices. So the variable keeps the
    user's value before and after: child processes inherit it, whichever XLA they have.
    """
    global _started_with
    if _started_with is not None or os.environ.get("PJRT_DEVICE") != "CPU":
        return
    given = os.environ.get(_VARIABLE, "")
    missing = left_open(given)
    if not missing:
        return
    if _private.runtime_has_started():
        _say_too_late(missing)
        return
    wanted = " ".join([given, *map(_switched_off, missing)]).strip()
    with environment_variable(_VARIABLE, wanted):
        _private.start_runtime()
    # On a TPU the variables stay: there torch_xla starts the devices when it likes, and reads them.
    take_back()
    _started_with = wanted


def left_open(given: str) -> list[str]:
    """The flags of this file that `given`, the value of XLA_FLAGS, doesn't set."""
    return [name for name in _OFF if name not in given]


def in_force() -> list[str]:
    """The flags that XLA was started with, or will start with."""
    given = os.environ.get(_VARIABLE, "") if _started_with is None else _started_with
    return given.split()


def _switched_off(name: str) -> str:
    return f"--{name}=false"


def _say_too_late(missing: list[str]) -> None:
    wrong = ", and ".join(_OFF[name] for name in missing)
    flags = " ".join(map(_switched_off, missing))
    if is_new(flags):
        logging.getLogger("spmdzero").warning(
            "torch_xla used a device before spmdzero did, so XLA runs without flags of "
            "spmdzero's, and %s: set XLA_FLAGS=%r",
            wrong,
            flags,
        )
