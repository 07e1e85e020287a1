"""Compiled programs on disk, which later processes load instead of lowering and compiling them.

A file's name is a digest of the recorded operations, the shardings of inputs and outputs, and all
that influences lowering and compiling: versions, sources, settings, flags, devices. Recording
itself runs the user's Python at each start, because only that shows what it does.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import stat
import struct
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import torch
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import NamedSharding

from spmdzero._logging import log_once
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.graph._options import of_devices

_BACKEND = Path(__file__).parents[2]
# Settings that don't change a program.
_NO_MATTER = re.compile(r"cache|log|profiler|traceback|coordination|distributed")
# Part of the text of an object that shows its address.
_ADDRESS = " at 0x"
_LENGTH = struct.Struct("<I")
_FIRST = b"spmdzero program 1\n"
_SUM = hashlib.sha256().digest_size
# Prefix and suffix of unfinished files. The folder may have files of others too, as /tmp does.
_PART = "spmdzero-", ".part"
# Age in seconds after which an unfinished file is abandoned: writing takes less than one.
_LEFT = 3600


@dataclasses.dataclass(frozen=True)
class Ready:
    """A compiled program, ready to run.

    Attributes:
        compiled: JAX's executable.
        aliased: number of inputs whose memory it gives to outputs.
        meets: see `spmdzero.backend.jax.graph._execute.Executable`.
    """

    compiled: Any
    aliased: int
    meets: str


class KeptPrograms:
    """The programs in a folder.

    Args:
        path: the folder.
    """

    def __init__(self, path: str) -> None:
        self._folder = Folder(Path(path))
        self._folder.clear()

    def key(
        self,
        graph: Graph,
        arrays: Sequence[Any],
        *,
        donated: tuple[int, ...],
        shardings: Any,
        mesh: Any,
    ) -> str | None:
        """The name of a program, see `Compilations.executable`; None if it can't be named."""
        names = [(step.scope, step.space) for step in graph.steps]
        forms = [
            (a.shape, str(a.dtype), getattr(a, "weak_type", False), _sharding(a.sharding))
            for a in arrays
        ]
        given = (graph.key, names, forms, donated, [_sharding(s) for s in shardings])
        around = (_surroundings(), _settings(), sorted((of_devices(mesh) or {}).items()))
        said = repr((given, around))
        place = said.find(_ADDRESS)
        if place < 0:
            return hashlib.sha256(said.encode()).hexdigest()
        log_once(
            '"spmd": {"compile_cache": ...} keeps some programs not: what compiles them holds an '
            f"object whose text is another in each process, ...{said[max(0, place - 60) : place]}"
        )
        return None

    def load(self, key: str) -> Ready | None:
        """The program of that name; None if there is none that works."""
        body = self._folder.read(key)
        if body is None:
            return None
        try:
            (length,) = _LENGTH.unpack_from(body)
            end = _LENGTH.size + length
            about = json.loads(body[_LENGTH.size : end])
            by_id = {device.id: device for device in jax.devices()}
            compiled = deserialize_and_load(
                body[end:],
                jax.tree_util.tree_structure(((0,) * about["inputs"], {})),
                jax.tree_util.tree_structure([0] * about["outputs"]),
                # With devices that it wasn't compiled for it would end the process when it runs.
                execution_devices=[by_id[number] for number in about["devices"]],
            )
        except Exception as error:
            self._folder.ignore(key, f"JAX can't load it ({type(error).__name__}: {error})")
            return None
        return Ready(compiled, about["aliased"], about["meets"])

    def save(self, key: str, ready: Ready, *, inputs: int, outputs: int) -> None:
        """Writes a program, unless it calls functions that only lowering registers."""
        compiled = ready.compiled
        devices = _devices(compiled)
        if devices is None or _calls_libraries(compiled):
            return
        try:
            payload, _, _ = serialize(compiled)
        except Exception as error:
            log_once(
                '"spmd": {"compile_cache": ...} keeps a program not: JAX can\'t write it '
                f"({type(error).__name__}: {error})"
            )
            return
        about = {
            "inputs": inputs, "outputs": outputs, "aliased": ready.aliased, "meets": ready.meets,
            "devices": devices,
        }  # fmt: skip
        head = json.dumps(about).encode()
        self._folder.write(key, _LENGTH.pack(len(head)) + head + payload)


def _devices(compiled: Any) -> list[int] | None:
    """Numbers of a program's devices, in its order; None where JAX hides them."""
    for sharding in jax.tree_util.tree_leaves(
        (compiled.input_shardings, compiled.output_shardings)
    ):
        if isinstance(sharding, NamedSharding):
            return [device.id for device in sharding.mesh.devices.flat]
        if len(sharding.device_set) == 1:
            return [device.id for device in sharding.device_set]
    return None


def _calls_libraries(compiled: Any) -> bool:
    # On the CPU JAX hands LAPACK's functions to XLA while it lowers their calls. A program that is
    # loaded without lowering would call nothing, and end the process.
    return jax.default_backend() == "cpu" and "custom-call" in compiled.as_text()


def _sharding(sharding: Any) -> Any:
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        places = [device.id for device in mesh.devices.flat]
        return mesh.axis_names, mesh.devices.shape, places, sharding.spec, sharding.memory_kind
    if sharding is None:
        return None
    return str(sharding), sorted(device.id for device in sharding.device_set)


@functools.cache
def _surroundings() -> tuple[Any, ...]:
    """All that influences lowering and compiling in this process."""
    sources = hashlib.sha256()
    for file in sorted(_BACKEND.rglob("*.py")):
        sources.update(file.relative_to(_BACKEND).as_posix().encode() + file.read_bytes())
    devices = [(d.id, d.device_kind, d.process_index) for d in jax.devices()]
    client = jax.devices()[0].client
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    packages = [_version(name) for name in ("jax", "jaxlib", "libtpu")]
    return (
        *(sources.hexdigest(), *packages, torch.__version__, *flags, devices),
        *(client.platform, client.platform_version, jax.process_index(), jax.process_count()),
        _processor() if client.platform == "cpu" else "",
    )


def _settings() -> list[tuple[str, str]]:
    values = sorted(jax.config.values.items())
    return [(name, repr(value)) for name, value in values if not _NO_MATTER.search(name)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """A description of the processor: machine code may hold instructions that another lacks."""
    said = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(said)
    kinds = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return " ".join(said + sorted({line for line in lines if line.startswith(kinds)}))


@dataclasses.dataclass(frozen=True)
class Folder:
    """Files with bytes, by key.

    Attributes:
        path: the folder, which the first write creates.
    """

    path: Path

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.program"

    def read(self, key: str) -> bytes | None:
        """The bytes written under `key`; None where there are none, or they are damaged."""
        file = self._file(key)
        try:
            with file.open("rb") as opened:
                refusal, data = _refusal(os.fstat(opened.fileno())), opened.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.ignore(key, str(error))
            return None
        if refusal:
            self.ignore(key, refusal)
            return None
        head, body = data[: len(_FIRST) + _SUM], data[len(_FIRST) + _SUM :]
        # The checksum includes the key: a file under another's name counts as damaged.
        if head != _FIRST + _sum(key, body):
            self.ignore(key, "it is damaged, or no file of this version of spmdzero")
            return None
        return body

    def ignore(self, key: str, why: str) -> None:
        """Logs that a file is not used, and will be replaced."""
        log_once(
            f"the compiled program {self._file(key)} is ignored, compiled anew and replaced: {why}"
        )

    def clear(self) -> None:
        """Removes unfinished files of killed writers: those of this user that are an hour old."""
        prefix, suffix = _PART
        for file in self.path.glob(f"{prefix}*{suffix}"):
            # Another process may have removed it meanwhile.
            with contextlib.suppress(OSError):
                found = file.lstat()
                if found.st_uid == os.geteuid() and found.st_mtime < time.time() - _LEFT:
                    file.unlink()

    def write(self, key: str, body: bytes) -> None:
        """Writes `body`; if that fails, logs it and goes on."""
        name = ""
        try:
            # The files are machine code: no other user should be able to write there.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path, prefix=_PART[0], suffix=_PART[1])
            with os.fdopen(handle, "wb") as file:
                file.write(_FIRST + _sum(key, body) + body)
            os.replace(name, self._file(key))
        except OSError as error:
            log_once(f'"spmd": {{"compile_cache": "{self.path}"}} keeps nothing: {error}')
            with contextlib.suppress(OSError):
                os.unlink(name)


def _refusal(file: os.stat_result) -> str:
    """The reason why a file must not be read, since loading runs it; empty if it is this user's.

    A user who may only write to the folder can neither make such a file nor rename one.
    """
    if file.st_uid != os.geteuid():
        return f"it is another user's (number {file.st_uid}, this process is {os.geteuid()})"
    if file.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it ({stat.filemode(file.st_mode)})"
    return ""


def _sum(key: str, body: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(body)
    return digest.digest()
