"""torch_xla as a backend."""

from spmdzero.backend.protocols._backend import Backend
from spmdzero.backend.replica import (
    GradientReduction,
    global_norm,
    in_region,
    recomputed,
    recomputed_from_host,
    refuse_leak,
)
from spmdzero.backend.torch_xla import (
    arrays,
    counters,
    flags,
    programs,
    runtime,
)
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.backend.torch_xla.region import global_forward, replica_region

TORCH_XLA = Backend(
    name="torch_xla",
    device_type="xla",
    runtime=runtime,
    arrays=arrays,
    programs=programs,
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
    shared_replicas=False,
    loops=False,
    low_precision=False,
    attention_kernels=False,
    views_in_inference_mode=False,
    # With the mode that follows ranks, torch_xla traces another graph at each step.
    world_of_devices=False,
)
