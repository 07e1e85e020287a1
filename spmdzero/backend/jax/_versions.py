"""What differs between the versions of JAX and torch that this backend works with."""

import contextlib

import jax


def wide_numbers() -> contextlib.AbstractContextManager[object]:
    """Inside, JAX has numbers of 64 bits, as torch does; elsewhere JAX stays as its user set it."""
    context = getattr(jax, "enable_x64", None)
    if context is None or not callable(context):
        from jax.experimental import enable_x64 as context
    return context(True)
