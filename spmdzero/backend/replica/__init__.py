"""The replica region of both backends: a module's forward and backward run once per device."""

from spmdzero.backend.replica._around import Around, FollowError, Quirks
from spmdzero.backend.replica._border import refuse_leak
from spmdzero.backend.replica._gathered import GatheredAtUse, Gathering
from spmdzero.backend.replica._global import GlobalForward
from spmdzero.backend.replica._manual import leave_stacked, read_stacked
from spmdzero.backend.replica._norm import global_norm
from spmdzero.backend.replica._products import PRODUCTS, mixed_dtypes
from spmdzero.backend.replica._random import (
    IN_PLACE,
    KNOWN_DRAWS,
    REPLACEMENTS,
    Random,
    ReplicaRandom,
    has_generator,
    stream_of,
)
from spmdzero.backend.replica._readers import (
    Reader,
    common_value,
    current_reader,
    in_region,
    reads_are_global,
    reads_by,
    refuse_read_without_data,
    shown_values,
    text_without_data,
    zeros_without_data,
)
from spmdzero.backend.replica._recompute import kept_on_host, recomputed, recomputed_from_host
from spmdzero.backend.replica._recomputed_blocks import RecomputedBlocks
from spmdzero.backend.replica._reduction import GradientReduction
from spmdzero.backend.replica._region import ReplicaRegion
from spmdzero.backend.replica._scaled_products import ScaledProducts
from spmdzero.backend.replica._shapes_of_data import Indexing, made_static
from spmdzero.backend.replica._shapes_of_data import gives_one as gives_shape_of_data

__all__ = [
    "IN_PLACE",
    "KNOWN_DRAWS",
    "PRODUCTS",
    "REPLACEMENTS",
    "Around",
    "FollowError",
    "GatheredAtUse",
    "Gathering",
    "GlobalForward",
    "GradientReduction",
    "Indexing",
    "Quirks",
    "Random",
    "Reader",
    "RecomputedBlocks",
    "ReplicaRandom",
    "ReplicaRegion",
    "ScaledProducts",
    "common_value",
    "current_reader",
    "gives_shape_of_data",
    "global_norm",
    "has_generator",
    "in_region",
    "kept_on_host",
    "leave_stacked",
    "made_static",
    "mixed_dtypes",
    "read_stacked",
    "reads_are_global",
    "reads_by",
    "recomputed",
    "recomputed_from_host",
    "refuse_leak",
    "refuse_read_without_data",
    "shown_values",
    "stream_of",
    "text_without_data",
    "zeros_without_data",
]
