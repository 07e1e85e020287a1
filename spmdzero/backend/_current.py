"""The one place that chooses a backend."""

import functools

from spmdzero.backend._backend import Backend


@functools.cache
def current() -> Backend:
    """The backend in use, imported when it is first asked for."""
    from spmdzero.backend.torch_xla import TorchXla

    return TorchXla()
