"""torch_xla as a backend."""

from spmdzero.backend._backend import Backend
from spmdzero.backend.torch_xla import (
    arrays,
    compiler,
    counters,
    flags,
    memory_maps,
    programs,
    runtime,
)
from spmdzero.backend.torch_xla._boundary import refuse_leak
from spmdzero.backend.torch_xla._global import GlobalForward
from spmdzero.backend.torch_xla._norm import global_norm
from spmdzero.backend.torch_xla._reads import in_region
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.backend.torch_xla.recompute import recomputed
from spmdzero.backend.torch_xla.reduction import GradientReduction
from spmdzero.backend.torch_xla.region import ReplicaRegion

TORCH_XLA = Backend(
    name="torch_xla",
    device_type="xla",
    runtime=runtime,
    arrays=arrays,
    programs=programs,
    compiler=compiler,
    counters=counters,
    flags=flags,
    memory_maps=memory_maps,
    mesh=DeviceMesh,
    region=ReplicaRegion,
    global_forward=GlobalForward,
    reduction=GradientReduction.over,
    global_norm=global_norm,
    in_region=in_region,
    refuse_leak=refuse_leak,
    recomputed=recomputed,
)
