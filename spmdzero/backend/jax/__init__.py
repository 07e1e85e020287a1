"""Everything that knows JAX: lazy tensors, graphs of them, the table of operations, mesh, hosts."""

import os

import numpy as np

from spmdzero.backend._left_variables import noted
from spmdzero.backend.chips._chips import has_tpu_chips

# JAX's imports draw from NumPy's generator, whose next numbers belong to the user.
_drawn = np.random.get_state()

with noted():
    # Where there is no TPU, libtpu would ask for its metadata for minutes.
    if not has_tpu_chips():
        _gpu = os.path.exists("/dev/nvidia0") and os.environ.get("PJRT_DEVICE") != "CPU"
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if _gpu else "cpu")

    from spmdzero.backend.jax._backend import JAX as BACKEND

    # These modules register, on import, answers to Python calls of tensors, and operations that are
    # answered in another way than by recording them.
    from spmdzero.backend.jax.hosts import _collectives  # noqa: F401
    from spmdzero.backend.jax.lazy import (
        _calls,  # noqa: F401
        _packed,  # noqa: F401
        _python,  # noqa: F401
        _random,  # noqa: F401
        _special,  # noqa: F401
        _storage,  # noqa: F401
        _strided,  # noqa: F401
    )

np.random.set_state(_drawn)

__all__ = ["BACKEND"]
