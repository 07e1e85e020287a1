"""Everything that knows JAX: lazy tensors, the table of operations, mesh, programs."""

import os

import numpy as np

from spmdzero.backend.chips._chips import has_tpu_chips

# libtpu asks for a TPU's metadata, for minutes, where there is none.
if not has_tpu_chips():
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if os.path.exists("/dev/nvidia0") else "cpu")

# What JAX imports draws from NumPy's generator, whose next numbers are the user's.
_drawn = np.random.get_state()

# They are imported for what they register: what Python calls of a tensor ask of its device, and
# what is answered in another way than by a record.
from spmdzero.backend.jax import _calls, _python, _random, _special, _strided  # noqa: E402, F401
from spmdzero.backend.jax._backend import JAX as BACKEND  # noqa: E402

np.random.set_state(_drawn)

__all__ = ["BACKEND"]
