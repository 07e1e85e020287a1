"""What differs between the versions of JAX and torch that this backend works with."""

import contextlib

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
