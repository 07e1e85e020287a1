"""The backends, which know devices: their protocols, and a folder for each compiler's front end."""

from spmdzero.backend import _memory_maps as memory_maps
from spmdzero.backend._current import (
    arrays,
    choice_in_words,
    choose,
    compiler,
    counters,
    current,
    extra_of_backend,
    flags,
    host_memory,
    is_chosen,
    lowering,
    programs,
    runtime,
)
from spmdzero.backend._interrupts import held, let_in
from spmdzero.backend._keys import draw_keys, key_of
from spmdzero.backend._named_states import follow as follow_named_states
from spmdzero.backend._old_norms import old_norm_error, old_norms
from spmdzero.backend._packing import packing
from spmdzero.backend._seeding import follow_torchs_seed
from spmdzero.backend._traced import is_tracing_only, on_torus, tracing_only
from spmdzero.backend._uploads import same_on_hosts
from spmdzero.backend.chips._flag_sets import FLAG_SETS
from spmdzero.backend.chips._torus import Torus, scatter_steps, scatters_whole
from spmdzero.backend.forms._autograd_graph import hands_over, is_transforming, nodes_behind
from spmdzero.backend.forms._indices import (
    INDICES,
    LABEL,
    IndexRange,
    IndexSites,
    first_flag,
    note_index,
)
from spmdzero.backend.forms._own_rows import (
    keep_same,
    local_replicas,
    to_all_rows,
    to_own_rows,
)
from spmdzero.backend.forms._stored import gather, relaid, resting, store, stored_zeros
from spmdzero.backend.forms._tree import (
    TENSORS,
    Batch,
    Replicated,
    Skeleton,
    UnknownContentError,
    device_types,
    form_of,
    found,
    map_tensors,
    mapped,
    refuse_unknown,
    replicated,
)
from spmdzero.backend.forms._users_dtensors import is_dtensor, undistributed
from spmdzero.backend.forms._with_graph import refuse_graph
from spmdzero.backend.forms._work import Product, Work, counted_as
from spmdzero.backend.protocols._arrays import Arrays, Form
from spmdzero.backend.protocols._compiler import (
    Beginning,
    Compiler,
    FoldedFunction,
    Kept,
    Repeat,
    StandInKeptError,
)
from spmdzero.backend.protocols._mesh import REPLICATED, Across, Mesh, PartitionSpec, Reduction
from spmdzero.backend.protocols._programs import Lowering, Placeholders, Programs
from spmdzero.backend.protocols._region import (
    AttentionCall,
    Forward,
    KeySource,
    Passage,
    Region,
    RegionRules,
    Tracing,
    refuse_gradient_hooks,
)

__all__ = [
    "FLAG_SETS",
    "INDICES",
    "LABEL",
    "REPLICATED",
    "TENSORS",
    "Across",
    "Arrays",
    "AttentionCall",
    "Batch",
    "Beginning",
    "Compiler",
    "FoldedFunction",
    "Form",
    "Forward",
    "IndexRange",
    "IndexSites",
    "Kept",
    "KeySource",
    "Lowering",
    "Mesh",
    "PartitionSpec",
    "Passage",
    "Placeholders",
    "Product",
    "Programs",
    "Reduction",
    "Region",
    "RegionRules",
    "Repeat",
    "Replicated",
    "Skeleton",
    "StandInKeptError",
    "Torus",
    "Tracing",
    "UnknownContentError",
    "Work",
    "arrays",
    "choice_in_words",
    "choose",
    "compiler",
    "counted_as",
    "counters",
    "current",
    "device_types",
    "draw_keys",
    "extra_of_backend",
    "first_flag",
    "flags",
    "follow_named_states",
    "follow_torchs_seed",
    "form_of",
    "found",
    "gather",
    "hands_over",
    "held",
    "host_memory",
    "is_chosen",
    "is_dtensor",
    "is_tracing_only",
    "is_transforming",
    "keep_same",
    "key_of",
    "let_in",
    "local_replicas",
    "lowering",
    "map_tensors",
    "mapped",
    "memory_maps",
    "nodes_behind",
    "note_index",
    "old_norm_error",
    "old_norms",
    "on_torus",
    "packing",
    "programs",
    "refuse_gradient_hooks",
    "refuse_graph",
    "refuse_unknown",
    "relaid",
    "replicated",
    "resting",
    "runtime",
    "same_on_hosts",
    "scatter_steps",
    "scatters_whole",
    "store",
    "stored_zeros",
    "to_all_rows",
    "to_own_rows",
    "tracing_only",
    "undistributed",
]
