"""Named sets of TPU compiler flags: those with a measured or published effect, none on numbers."""

import os
from collections.abc import Mapping

from spmdzero._logging import log_once
from spmdzero.backend._programs import XlaFlag
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._cpu_flags import in_force as cpu_flags
from spmdzero.backend.torch_xla.compile_cache import use as use_cache
from spmdzero.errors import SpmdZeroRuntimeError, SpmdZeroUsageError

__all__ = ["FLAG_SETS", "apply", "cpu_flags", "flags_for", "in_force", "use_cache"]

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
    "becomes reduce-scatters, and temporary memory falls from 35.3 to 1.2 MiB"
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
FLAG_SETS: Mapping[str, tuple[XlaFlag, ...]] = {
    "none": (),
    "v5e": (_KEEP_GATHERS,),
    "v5p": (_KEEP_GATHERS,),
    "v6e": (_KEEP_GATHERS, *_SCATTER),
}


def flags_for(name: str) -> Mapping[str, str]:
    """The flags of a set, name -> value; compile options of an ahead-of-time compilation.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    if name not in FLAG_SETS:
        raise SpmdZeroUsageError(
            f"there is no set of XLA flags named {name!r}: use one of {', '.join(FLAG_SETS)}"
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
