"""Named sets of TPU compiler flags, each with a measured or published effect.

None changes numbers, but perhaps the last bits of two of tpu7x's.
"""

import os
from collections.abc import Mapping

from spmdzero.backend.protocols._programs import XlaFlag
from spmdzero.errors import SpmdZeroUsageError

VARIABLE = "LIBTPU_INIT_ARGS"

_KEEP_GATHERS = XlaFlag(
    name="xla_tpu_prefer_async_allgather_to_allreduce",
    value="true",
    effect="an all-gather is not compiled to an all-reduce of zero-padded shards, which moves "
    "twice the bytes; without it that happens on v5e:8x8 and v5p:4x4x4",
    source="torch_xla 2.9.0 sets it on TPU (torch_xla/__init__.py); measured with libtpu 0.0.21; "
    "0.0.50.1 leaves v5e:8x8 its all-gathers without it, and v5p:4x4x4 none with it",
)
_SCATTER_SOURCE = (
    "measured with libtpu 0.0.21 on v6e:2x4, both flags together: one all-reduce of all gradients "
    "becomes reduce-scatters, and temporary memory falls from 35.3 to 1.2 MiB; on v5e:4x4 no "
    "reduce-scatter over one direction is padded and then shifted by a collective-permute"
)
_SCATTER = (
    XlaFlag(
        name="xla_tpu_use_minor_sharding_for_major_trivial_input",
        value="true",
        effect="gradients of small matrices are reduce-scattered, not summed whole",
        source=_SCATTER_SOURCE,
    ),
    XlaFlag(
        name="xla_tpu_relayout_group_size_threshold_for_reduce_scatter",
        value="1",
        effect="gradients of small matrices are reduce-scattered, not summed whole",
        source=_SCATTER_SOURCE,
    ),
)
_HIDE_SOURCE = (
    "measured with libtpu 0.0.21 (tests/explain/test_hidden_wire.py; docs/design.md has the table)"
)
_HIDE_PUBLISHED = (
    f"{_HIDE_SOURCE}; published among the flags that MaxDiffusion is trained with on v5p"
)
_FUSE_SCATTER = XlaFlag(
    name="xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
    value="true",
    effect="the matrix products of the backward run between a reduce-scatter's start and end",
    source=_HIDE_SOURCE,
)
_HIDE = (
    XlaFlag(
        name="xla_enable_async_reduce_scatter_fusion",
        value="true",
        effect="a reduce-scatter has a start and an end",
        source=_HIDE_PUBLISHED,
    ),
    _FUSE_SCATTER,
    XlaFlag(
        name="xla_tpu_ars_combiner_threshold_in_bytes",
        value="1",
        effect="each gradient is reduce-scattered when it is made: combined with others it waits "
        "for the last of them, and is never asynchronous",
        source=_HIDE_SOURCE,
    ),
    XlaFlag(
        name="xla_tpu_decompose_every_reduce_scatters_hlos",
        value="true",
        effect="reduce-scatters that the program itself calls can be asynchronous too",
        source=_HIDE_SOURCE,
    ),
    XlaFlag(
        name="xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions",
        value="true",
        effect="a parameter's all-gather runs while the next ones are updated",
        source=_HIDE_SOURCE,
    ),
    XlaFlag(
        name="xla_tpu_scoped_vmem_limit_kib",
        value="32768",
        effect="a matrix product and the transfer that runs beside it have room in VMEM; within "
        "the 16 MiB that libtpu leaves them, one of them did not compile on v5e",
        source=_HIDE_SOURCE,
    ),
)
_ALL = (_KEEP_GATHERS, *_SCATTER, *_HIDE)
# torch_xla itself passes this flag. JAX's programs need it too: without it libtpu 0.0.21 turns
# the parameters' all-gathers into all-reduces on v5e:8x8, and a step moves 1.50 times the floor
# (1.00 with it).
ALWAYS: Mapping[str, str] = {_KEEP_GATHERS.name: _KEEP_GATHERS.value}
# libtpu 0.0.50 compiles nothing with this flag on other chips: it "is only supported on TPU v5e",
# and may lead to "incorrect results, hang, SDC" elsewhere. libtpu 0.0.21 accepts it silently.
_BUT_ON_V5E = tuple(flag for flag in _ALL if flag is not _FUSE_SCATTER)
# On tpu7x SparseCores scatter and gather beside compute without a flag, so none of those above has
# anything left to do.
_TPU7X_SOURCE = (
    "published: AI-Hypercomputer/tpu-recipes trains Llama 3.1 and others with the four together on "
    "tpu7x; libtpu 0.0.50.1 and 0.0.52 take it (docs/design.md has what they make of it)"
)
_TPU7X = (
    XlaFlag(
        name="xla_tpu_scoped_vmem_limit_kib",
        value="61440",
        effect="a matrix product has nearly all of the 64 MiB of VMEM: by the estimate a step of "
        "wide layers takes 15 % less, one of narrow layers 5 % more",
        source=_TPU7X_SOURCE,
    ),
    XlaFlag(
        name="xla_tpu_bf16_emission_mode",
        value="NATIVE_EMISSION",
        effect="the vector unit computes bf16 as such; HLO and its cycles stay the same, so that "
        "nothing here tells whether it rounds otherwise",
        source=_TPU7X_SOURCE,
    ),
    XlaFlag(
        name="xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        value="true",
        effect="SparseCores sum too what is neither scattered nor gathered, possibly in another "
        "order",
        source=_TPU7X_SOURCE,
    ),
    XlaFlag(
        name="xla_tpu_use_single_sparse_core_for_all_gather_offload",
        value="true",
        effect="an all-gather takes one SparseCore and leaves the others to other transfers",
        source=_TPU7X_SOURCE,
    ),
)
FLAG_SETS: Mapping[str, tuple[XlaFlag, ...]] = {
    "none": (),
    "v5e": _ALL,
    "v5p": _BUT_ON_V5E,
    "v6e": _BUT_ON_V5E,
    "tpu7x": _TPU7X,
}


def flags_of(name: str, *, chip: str | None) -> Mapping[str, str]:
    """The flags of a set, name -> value, also for an ahead-of-time compilation's options.

    Args:
        name: of a set, or ``"auto"``.
        chip: the generation whose set ``"auto"`` takes; one without a set has no flags.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    if name == "auto":
        name = chip if chip in FLAG_SETS else "none"
    if name not in FLAG_SETS:
        raise SpmdZeroUsageError(
            f"there is no set of XLA flags named {name!r}: use auto or one of "
            f"{', '.join(FLAG_SETS)}"
        )
    return {flag.name: flag.value for flag in FLAG_SETS[name]}


def given_to_libtpu() -> dict[str, str]:
    """The flags that the environment hands to libtpu, name -> value."""
    given = os.environ.get(VARIABLE, "").split()
    pairs = (flag.lstrip("-").partition("=") for flag in given if flag.startswith("--"))
    return {name: value for name, _, value in pairs}


def no_effect_here(name: str) -> str:
    """A message for a set of flags that was chosen where there is no TPU."""
    return (
        f'"spmd": {{"xla_flags": "{name}"}} has no effect here, it sets flags of the TPU compiler'
    )
