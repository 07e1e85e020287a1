"""Memory maps: a compiled program for the CPU takes 10 to 1,000, and Linux allows so many.

A process at the limit (`vm.max_map_count`, 65,530 by default) ends in a segmentation fault: the
next program's code has no place. torch_xla keeps the latest 2,048 programs.
"""

import os
from pathlib import Path

import torch
import torch_xla.runtime as xr

from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._environment import environment_variable

_VARIABLE = "XLA_COMPILATION_CACHE_SIZE"
_LIMIT = Path("/proc/sys/vm/max_map_count")
_OWN = Path("/proc/self/maps")
# What torch_xla keeps unless it is told otherwise.
_DEFAULT = 2048
# More than most programs take: 40 to 130 in this project's tests, 410 for a network of 15
# convolutions with its backward. `make_room` is for the rest.
_OF_A_PROGRAM = 256


def limit() -> int | None:
    """The maps that this process may have; None where there is no such limit."""
    return int(_LIMIT.read_text()) if _LIMIT.exists() else None


def count() -> int:
    """The maps that this process has; takes about a microsecond for each."""
    return _OWN.read_bytes().count(b"\n")


def bound_cache() -> None:
    """Has torch_xla keep only as many programs as there are maps for; on the CPU only.

    Does nothing when the environment says how many, or something was compiled already.
    """
    allowed = limit()
    if (
        allowed is None
        or os.environ.get(_VARIABLE)
        or xr.device_type() != "CPU"
        or _private.has_compiled()
    ):
        return
    programs = min(allowed // _OF_A_PROGRAM, _DEFAULT)
    with environment_variable(_VARIABLE, str(programs)):
        # torch_xla reads the variable here.
        _private.cached_programs()
    global _capacity
    _capacity = programs


_capacity: int | None = None
_fillers = 0


def make_room() -> int:
    """Has torch_xla let go of its least used programs when three quarters of the maps are taken.

    There is no call for that: each of the small programs that are compiled here takes the place of
    one. Whoever still needs what is gone compiles it again.

    Returns how many programs it compiled, 0 where there was room or the CPU runs nothing.
    """
    global _fillers
    allowed = limit()
    if allowed is None or xr.device_type() != "CPU" or count() < allowed * 3 // 4:
        return 0
    capacity = _capacity or int(os.environ.get(_VARIABLE) or _DEFAULT)
    before = _fillers
    # The first fill up what torch_xla has left.
    while _fillers - before < capacity and (
        _private.cached_programs() < capacity or count() > allowed // 2
    ):
        _fillers += 1
        _private.compile_pending([torch.zeros(_fillers, 1, 1, device="xla")])
    return _fillers - before
