"""The kernels, lowered once for each form, as operations of a traced program."""

import contextlib
import functools
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from spmdzero.backend.attention import Direction, Form, Kernels, dtype_name, jax_function
from spmdzero.backend.replica._anchors import kept
from spmdzero.backend.replica._recompute import kept_of_kernel
from spmdzero.backend.torch_xla import _private


def _run(direction: Direction, form: Form, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    shapes = tuple((tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors)
    made = _private.call(_computation(direction, form, shapes), tensors)
    made = kept(kept_of_kernel(made)) if direction == "forward" else made
    # torch_xla doesn't wrap the results of a call, and writes through their views would be lost.
    return [torch.ops.aten.lift_fresh.default(tensor) for tensor in made]


# libtpu 0.0.21 reads the kernels that this version of JAX writes.
KERNELS = Kernels(run=_run, install="pip install 'spmdzero[tpu]'", version="0.7.1")


@functools.cache
def _computation(direction: Direction, form: Form, shapes: tuple[Any, ...]) -> Any:
    with _nothing_left():
        # This imports jax, which is an extra.
        from spmdzero.backend.torch_xla.attention import _lowering

        # `explain` leaves out the blocks that a causal mask or a window hides.
        scope = f"attention.{direction}{form.scope}"
        function = jax_function(direction, form)
        lowered = _lowering.lowered(function, shapes, platform=form.platform, scope=scope)
        return _private.computation(lowered)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Context around the import of jax, after which generators and environment are as before.

    In a forward, code that watches Python's and NumPy's draws would take them for the model's. And
    jax sets TPU_SKIP_MDS_QUERY where there is no chip, after which Lightning fails with a TypeError
    of torch_xla's when it looks for one.
    """
    python, numpy = random.getstate(), np.random.get_state()
    before = dict(os.environ)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
