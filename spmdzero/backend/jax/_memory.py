"""Tells which memory an array is in: that of its devices, or that of their host."""

from typing import Any

import jax

ON_HOST = "pinned_host"
"""What JAX calls memory of the host that devices read and write by themselves."""
ON_DEVICE = "device"


def rests_on_host(sharding: Any) -> bool:
    """Whether arrays of a sharding of JAX's are in the host's memory."""
    return getattr(sharding, "memory_kind", None) == ON_HOST


def on_devices(array: jax.Array) -> jax.Array:
    """The array itself, or a copy in the devices' memory of what rests in the host's."""
    if not rests_on_host(array.sharding):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(ON_DEVICE))


def copied(array: jax.Array) -> jax.Array:
    """A copy in the same memory."""
    if not rests_on_host(array.sharding):
        return array.copy()
    return jax.device_put(on_devices(array), array.sharding)
