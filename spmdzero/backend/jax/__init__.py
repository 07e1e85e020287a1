"""Everything that knows JAX: lazy tensors, the table of operations, mesh, programs."""

import os

# libtpu asks for a TPU's metadata, for minutes, where there is none.
if not (os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if os.path.exists("/dev/nvidia0") else "cpu")

# `_python` is imported for what it registers: what Python calls of a tensor ask of its device.
from spmdzero.backend.jax import _python  # noqa: F401
from spmdzero.backend.jax._backend import JAX as BACKEND

__all__ = ["BACKEND"]
