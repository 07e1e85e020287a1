"""The JAX backend: what torch dispatches, traced into JAX programs."""
