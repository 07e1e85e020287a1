"""The private calls of torch_xla, in one place, for the one version in which they are known.

Each of them has no public equivalent (manual sharding, optimised HLO), or one that costs 80 times
as much (`xs.mark_sharding` rebuilds an OpSharding at each call).
"""

# Import this first: with another version the rest may fail to import.
from spmdzero.backend.torch_xla._private._version import TESTED_VERSION
from spmdzero.backend.torch_xla._private.client import (
    runtime_has_started,
    spmd_is_locked,
    start_runtime,
)
from spmdzero.backend.torch_xla._private.programs import (
    annotated_program,
    cached_programs,
    compile_pending,
    has_compiled,
    optimized_hlo,
    program_text,
    record_scopes,
    scope,
)
from spmdzero.backend.torch_xla._private.sharding import (
    MANUAL,
    OpSharding,
    all_reduce,
    full_to_shard,
    is_manual,
    is_split,
    local_devices,
    local_replicas,
    local_shapes,
    local_slices,
    mark_sharding,
    overwrite,
    reduce_scatter,
    shard_to_full,
    sharding_of,
    shardings_of,
)
from spmdzero.backend.torch_xla._private.text import watch_text
from spmdzero.backend.torch_xla._private.values import (
    are_pending,
    buffer_ids,
    compute,
    output_ids,
    replace,
    set_value,
    write_stamp,
)
