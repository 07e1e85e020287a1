"""Named sets of TPU compiler flags: those with a measured or published effect, none on numbers."""

import os
from collections.abc import Mapping

from spmdzero._logging import log_once
from spmdzero.backend._programs import XlaFlag
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._cpu_flags import in_force as cpu_flags
from spmdzero.backend.torch_xla._environment import tpu_generation
from spmdzero.backend.torch_xla.compile_cache import use as use_cache
from spmdzero.errors import SpmdZeroRuntimeError, SpmdZeroUsageError

__all__ = ["ALWAYS", "FLAG_SETS", "apply", "cpu_flags", "flags_for", "in_force", "use_cache"]

_VARIABLE = "LIBTPU_INIT_ARGS"


_KEEP_GATHERS = XlaFlag(
    name="xla_tpu_prefer_async_allgather_to_allreduce",
    value="true",
    effect="an all-gather is not compiled to an all-reduce of zero-padded shards, which moves "
    "twice the bytes; without it that happens on v5e:8x8 and v5p:4x4x4",
    source="torch_xla 2.9.0 sets it on TPU (torch_xla/__init__.py); measured with libtpu 0.0.21",
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
_HIDE = (
    XlaFlag(
        name="xla_enable_async_reduce_scatter_fusion",
        value="true",
        effect="a reduce-scatter has a start and an end",
        source=_HIDE_PUBLISHED,
    ),
    XlaFlag(
        name="xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
        value="true",
        effect="the matrix products of the backward run between a reduce-scatter's start and end",
        source=_HIDE_PUBLISHED,
    ),
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
# What torch_xla itself passes.
ALWAYS: Mapping[str, str] = {_KEEP_GATHERS.name: _KEEP_GATHERS.value}
FLAG_SETS: Mapping[str, tuple[XlaFlag, ...]] = {"none": (), "v5e": _ALL, "v5p": _ALL, "v6e": _ALL}


def flags_for(name: str, *, chip: str | None = None) -> Mapping[str, str]:
    """The flags of a set, name -> value; compile options of an ahead-of-time compilation.

    Args:
        name: a set's, or ``"auto"``.
        chip: the generation whose set ``"auto"`` is, this machine's by default; one without a set
            has no flags.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    if name == "auto":
        chip = chip or (tpu_generation() if _on_tpu() else None)
        name = chip if chip in FLAG_SETS else "none"
    if name not in FLAG_SETS:
        raise SpmdZeroUsageError(
            f"there is no set of XLA flags named {name!r}: use auto or one of "
            f"{', '.join(FLAG_SETS)}"
        )
    return {flag.name: flag.value for flag in FLAG_SETS[name]}


def apply(name: str) -> None:
    """Hands a set to libtpu; flags that the environment names already keep the caller's value.

    Raises:
        SpmdZeroUsageError: there is no such set.
        SpmdZeroRuntimeError: the TPU client has started with other flags, and reads them once.
    """
    wanted = flags_for(name)
    missing = {key: value for key, value in wanted.items() if key not in in_force()}
    if not missing:
        return
    if not _on_tpu():
        log_once(
            f'"spmd": {{"xla_flags": "{name}"}} has no effect here, it sets flags of the TPU '
            "compiler"
        )
    elif _private.runtime_has_started():
        raise SpmdZeroRuntimeError(
            f'"spmd": {{"xla_flags": "{name}"}} comes too late: the TPU runtime has started '
            f"without {', '.join(missing)}. Call spmdzero.initialize before a device is used, or "
            f"start the program with {_VARIABLE}='{_written(missing)}'"
        )
    else:
        given = os.environ.get(_VARIABLE, "")
        os.environ[_VARIABLE] = f"{given} {_written(missing)}".strip()


def in_force() -> dict[str, str]:
    """The flags that this process hands to libtpu, name -> value."""
    given = os.environ.get(_VARIABLE, "").split()
    pairs = (flag.lstrip("-").partition("=") for flag in given if flag.startswith("--"))
    return {name: value for name, _, value in pairs}


def _written(flags: Mapping[str, str]) -> str:
    return " ".join(f"--{name}={value}" for name, value in flags.items())


def _on_tpu() -> bool:
    return os.environ.get("PJRT_DEVICE", "").upper() == "TPU"
