"""Memory maps, of which a program compiled for the CPU takes 10 to 1,000: Linux limits them.

A process at the limit (`vm.max_map_count`, 65,530 by default) ends in a segmentation fault, because
the next program's code has no place. torch_xla keeps the latest 2,048 programs.
"""

import os

import torch
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr

from spmdzero.backend._memory_maps import are_short, count, limit, say_room_was_made
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._environment import environment_variable

_VARIABLE = "XLA_COMPILATION_CACHE_SIZE"
# Number of programs that torch_xla keeps by default.
_DEFAULT = 2048
# Most programs take less: 40 to 130 in this project's tests, 410 for a network of 15 convolutions
# with its backward. `make_room` handles the rest.
_OF_A_PROGRAM = 256


def bound_cache() -> None:
    """Limits torch_xla's cache to as many programs as there are maps for; on the CPU only.

    Does nothing if the environment sets the number, or a program was compiled already.
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
# Numbers of programs that were compiled to make room, and of all programs at the latest look.
_fillers = _seen = 0


def fillers() -> int:
    """Number of programs that `make_room` has compiled."""
    return _fillers


def make_room() -> None:
    """Makes torch_xla discard its least used programs once three quarters of the maps are taken.

    There is no call for this: each small program that is compiled here takes the place of one. A
    discarded program that is still needed is compiled again. It looks only if something was
    compiled since the latest look, and only on CPUs.
    """
    global _fillers, _seen
    compiled = (met.metric_data("CompileTime") or (0,))[0]
    if compiled == _seen:
        return
    _seen, allowed = compiled, limit()
    if allowed is None or xr.device_type() != "CPU" or not are_short():
        return
    capacity = _capacity or int(os.environ.get(_VARIABLE) or _DEFAULT)
    before = _fillers
    # The first programs fill the free places of torch_xla's cache.
    while _fillers - before < capacity and (
        _private.cached_programs() < capacity or count() > allowed // 2
    ):
        _fillers += 1
        _private.compile_pending([torch.zeros(_fillers, 1, 1, device="xla")])
    say_room_was_made()
