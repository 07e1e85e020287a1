"""The one place that chooses a backend, and its parts by name."""

import functools
from typing import Any, cast

from spmdzero.backend._arrays import Arrays
from spmdzero.backend._backend import Backend
from spmdzero.backend._compiler import Compiler
from spmdzero.backend._programs import Counters, Flags, MemoryMaps, Programs
from spmdzero.backend._runtime import Runtime


@functools.cache
def current() -> Backend:
    """The backend in use, imported when it is first asked for."""
    from spmdzero.backend.torch_xla import TORCH_XLA

    return TORCH_XLA


class _Part:
    """A part of the backend in use, so that importing its name chooses none."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(current(), self._name), attribute)


runtime = cast(Runtime, _Part("runtime"))
arrays = cast(Arrays, _Part("arrays"))
programs = cast(Programs, _Part("programs"))
compiler = cast(Compiler, _Part("compiler"))
counters = cast(Counters, _Part("counters"))
flags = cast(Flags, _Part("flags"))
memory_maps = cast(MemoryMaps, _Part("memory_maps"))
