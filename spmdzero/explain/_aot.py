"""Compiles a program for TPUs on a machine without TPUs."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmdzero.backend import current
from spmdzero.backend import flags as own_flags
from spmdzero.errors import SpmdZeroRuntimeError, SpmdZeroUsageError
from spmdzero.explain import _kept, _passes
from spmdzero.explain._chips import CHIPS, Topology

_CHILD = Path(__file__).with_name("_aot_child.py")
# Equal operations share their machine code: the optimised HLO stays the same to the letter, and the
# compiler takes a third less host memory (measured with libtpu 0.0.21, 4 equal layers).
_LEAN: Mapping[str, str] = {"xla_tpu_enable_deduplicated_calls": "true"}
# libtpu's messages about a program that doesn't fit: "Used 120.51G of 95.74G hbm", and from 0.0.50
# on "the total memory required for HLO temporaries (42.85G) exceeds available HBM (31.24G)", which
# counts the program's inputs too.
_USED = re.compile(
    r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm"
    r"|HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM"
)
_RAISED = re.compile(r"[\w.]*Error: ")
_TIMEOUT = 1800  # seconds
_OF_THE_SET = (
    '\nIt was compiled with the flags of the set that "spmd": {"xla_flags": ...} names; '
    '"none" has none'
)
_MEMORY = ("arguments", "peak", "host_arguments", "host_peak")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    # Any accelerator is fine here: the topology of the request decides.
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Otherwise two simultaneous compilations collide on libtpu's lock file.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Code generation takes and frees memory on every thread: one heap per thread keeps a fifth
    # more.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


class WaitingError(Exception):
    """Ends this process, so that a program is compiled after its memory is free."""


@dataclass(frozen=True, kw_only=True)
class CompilerMemory:
    """A compiler's own account of one program, bytes per device, the host's memory apart.

    Attributes:
        arguments: the program's inputs: parameters, states, the batch; None if the compiler gave
            up, because the program doesn't fit.
        peak: the largest part of a device's memory that is in use at once, including inputs.
        host_arguments: inputs that rest in the host's memory; 0 if the compiler gave up.
        host_peak: the largest part of the host's memory in use at once for one device; 0 if the
            compiler gave up.
    """

    arguments: int | None
    peak: int
    host_arguments: int = 0
    host_peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One program as a compiler made it.

    Attributes:
        hlo: optimised, partitioned HLO text; None if the program doesn't fit.
        memory: bytes per device.
        flops: operations of one device in one run, by the compiler's cost analysis; None if the
            compiler gives none.
        bytes_accessed: bytes that one device reads and writes in one run; None if the compiler
            gives none.
    """

    hlo: str | None
    memory: CompilerMemory
    flops: float | None = None
    bytes_accessed: float | None = None


def require_tpu_compiler() -> None:
    """Checks that programs can be traced for TPUs that aren't here, and that libtpu is installed.

    Raises:
        SpmdZeroUsageError: the backend traces for this process's devices alone.
        SpmdZeroRuntimeError: libtpu is missing.
    """
    if current().lowering is None:
        raise SpmdZeroUsageError(
            f"a program for TPUs that aren't here is traced by JAX's backend, and this is "
            f"{current().name}'s. Set SPMDZERO_BACKEND=jax, with pip install 'spmdzero[jax]' "
            "'jax[tpu]'; or explain the program of this process's devices, without a TPU"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise SpmdZeroRuntimeError(
            "compiling for TPU needs libtpu, which is not installed: pip install 'jax[tpu]'"
        )


def require_slice(topology: Topology) -> None:
    """Checks that libtpu knows a slice, which takes seconds.

    Raises:
        SpmdZeroRuntimeError: libtpu is missing, or it has no such slice.
        SpmdZeroUsageError: see `require_tpu_compiler`.
    """
    require_tpu_compiler()
    with tempfile.TemporaryDirectory() as folder:
        _order(Path(folder), None, _request(topology, None), name=topology.name)
        _passes.compile_one(Path(folder))
        _result(Path(folder), topology)


def compile_for_tpu(
    program: bytes, topology: Topology, *, flags: Mapping[str, str] | None = None
) -> Compiled:
    """Compiles a program by libtpu, for chips that need not be present.

    Args:
        program: traced for `topology.devices` devices, see `spmdzero.backend.Placeholders`.
        topology: the chips.
        flags: XLA's compile options; None for the backend's own.

    Returns the compiled program, or only its memory if it needs more than a chip has.

    Raises:
        SpmdZeroRuntimeError: libtpu is missing, the compiler failed, or it took too long.
        SpmdZeroUsageError: see `require_tpu_compiler`.
        WaitingError: this process is a pass of `_passes`, and the program wasn't compiled before.
    """
    require_tpu_compiler()
    request = _request(topology, flags)
    hint = _OF_THE_SET if set(flags or ()) - set(own_flags.ALWAYS) else ""
    between = os.environ.get(_passes.FOLDER)
    told = json.dumps({**request, "libtpu": importlib.metadata.version("libtpu")}, sort_keys=True)
    key = hashlib.sha256(program + told.encode()).hexdigest()
    if between is None:
        kept = _kept.known(key)
        if kept is not None:
            return Compiled(memory=CompilerMemory(**kept.pop("memory")), **kept)
        with tempfile.TemporaryDirectory() as folder:
            _order(Path(folder), program, request, name=topology.name)
            _passes.compile_one(Path(folder))
            made = _read(Path(folder), topology, hint=hint)
        _kept.remember(key, asdict(made))
        return made
    folder = Path(between, key)
    if not folder.exists():
        folder.mkdir()
        _order(folder, program, request, name=topology.name)
        raise WaitingError
    return _read(folder, topology, hint=hint)


def _request(topology: Topology, flags: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "topology": topology.slice_name,
        "slices": topology.slices,
        "cores": topology.chip.cores,
        "devices": topology.devices,
        "flags": {**_LEAN, **(own_flags.ALWAYS if flags is None else flags)},
    }


def _order(folder: Path, module: bytes | None, request: dict[str, Any], *, name: str) -> None:
    files = {file: str(folder / file) for file in ("module", "hlo")}
    if module is not None:
        (folder / "module").write_bytes(module)
    (folder / "request").write_text(json.dumps({**request, **files}))
    environment = {**os.environ, **_ENVIRONMENT}
    # XLA_FLAGS are for this process's XLA; jaxlib's XLA aborts on a flag that it doesn't know.
    environment.pop("XLA_FLAGS", None)
    paths = [str(folder / name) for name in ("request", "result")]
    order = {
        "name": name,
        "command": [sys.executable, "-P", str(_CHILD), *paths],
        "environment": environment,
        "timeout": _TIMEOUT,
    }
    (folder / "order").write_text(json.dumps(order))


def _result(folder: Path, topology: Topology, *, hint: str = "") -> dict[str, Any]:
    """Reads what the compiler's process has written; raises where it failed or has no slice."""
    name = topology.name
    done = json.loads((folder / "status").read_text())
    if done["status"] is None:
        raise SpmdZeroRuntimeError(
            f"compiling for {name} took more than {_TIMEOUT} s. A smaller model or "
            "fewer layers shows the same collectives"
        )
    if done["status"] != 0:
        lines = done["said"].strip().splitlines()
        # The text of an error in a kernel ends with the whole kernel.
        raised = [place for place, line in enumerate(lines) if _RAISED.match(line)]
        last = "\n".join(lines[raised[-1] if raised else -8 :][:8])
        raise SpmdZeroRuntimeError(
            f"the TPU compiler failed for {name} (status {done['status']}):\n{last}{hint}"
        )
    result = json.loads((folder / "result").read_text())
    if "refused" in result:
        raise SpmdZeroRuntimeError(_refused(topology, result["refused"]))
    return result


def _read(folder: Path, topology: Topology, *, hint: str = "") -> Compiled:
    result, name = _result(folder, topology, hint=hint), topology.name
    if "exhausted" in result:
        peak = needed_by(result["exhausted"])
        if peak is None:
            raise SpmdZeroRuntimeError(
                f"the TPU compiler ran out of memory for {name}: {result['exhausted'][:1000]}"
            )
        return Compiled(hlo=None, memory=CompilerMemory(arguments=None, peak=peak))
    return Compiled(
        hlo=(folder / "hlo").read_text(),
        memory=CompilerMemory(**{name: result[name] for name in _MEMORY}),
        flops=result["flops"],
        bytes_accessed=result["bytes_accessed"],
    )


def needed_by(said: str) -> int | None:
    """Bytes of a device that a program needs, by libtpu's message that it has not as many."""
    found = _USED.search(said)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return round(float(number) * _UNITS[unit])


def _refused(topology: Topology, said: str) -> str:
    """Why libtpu has no such topology, and which libtpu has it."""
    chip, here = topology.chip, importlib.metadata.version("libtpu")
    refused = f"libtpu {here} has no topology {topology.slice_name} ({said})"
    if _number(here) >= _number(chip.libtpu):
        return f"{refused}. Take other numbers of chips: v5e:2x4 and v5p:2x2x2 are two that it has"
    older = ", ".join(known.name for known in CHIPS.values() if known.libtpu != chip.libtpu)
    return (
        f"{refused}. libtpu {chip.libtpu} compiles for {chip.name}: pip install --upgrade "
        f"'jax[tpu]' brings one. What is here compiles for {older}"
    )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
