"""JAX as a backend."""

from spmdzero.backend.jax import (
    arrays,
    compiler,
    counters,
    device_memory,
    flags,
    host_memory,
    lowering,
    programs,
    runtime,
)
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.backend.jax.region import global_forward, replica_region
from spmdzero.backend.protocols._backend import Backend
from spmdzero.backend.replica import (
    GradientReduction,
    global_norm,
    in_region,
    recomputed,
    recomputed_from_host,
    refuse_leak,
)

JAX = Backend(
    name="jax",
    device_type="xla",
    runtime=runtime,
    arrays=arrays,
    programs=programs,
    compiler=compiler,
    counters=counters,
    flags=flags,
    mesh=DeviceMesh,
    region=replica_region,
    global_forward=global_forward,
    reduction=GradientReduction.over,
    global_norm=global_norm,
    in_region=in_region,
    refuse_leak=refuse_leak,
    recomputed=recomputed,
    recomputed_from_host=recomputed_from_host,
    host_memory=host_memory,
    lowering=lowering,
    device_memory=device_memory,
)
