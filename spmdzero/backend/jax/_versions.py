"""What differs between the versions of JAX and torch that this backend works with."""

import contextlib
from typing import Any

import jax


def wide_numbers() -> contextlib.AbstractContextManager[object]:
    """Inside, JAX has numbers of 64 bits, as torch does; elsewhere JAX stays as its user set it."""
    return _enable_x64(True)


def narrow_numbers() -> contextlib.AbstractContextManager[object]:
    """Inside of `wide_numbers`, JAX has numbers of 32 bits again, which Pallas's kernels need."""
    return _enable_x64(False)


def _enable_x64(enabled: bool) -> contextlib.AbstractContextManager[object]:
    context = getattr(jax, "enable_x64", None)
    if context is None or not callable(context):
        from jax.experimental import enable_x64 as context
    return context(enabled)


def lowered_for(traced: Any, platform: str) -> Any:
    """A traced program, lowered for devices that need not be here, such as ``"tpu"``.

    As for an export, which writes Pallas's kernels in the older Mosaic version that a compiler
    apart from this JAX reads: libtpu 0.0.21 answers what jax 0.7.1 lowers otherwise with
    "expected <= 7 but got 8".
    """
    from jax._src.interpreters import mlir

    return traced.lower(
        lowering_platforms=(platform,),
        _private_parameters=mlir.LoweringParameters(for_export=True),
    )
