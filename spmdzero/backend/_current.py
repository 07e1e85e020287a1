"""The one place that chooses the backend, and gives access to its parts by name."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

from spmdzero import _torch_tpu
from spmdzero._names import did_you_mean
from spmdzero._torch_xla import (
    keep_torch_xla_out,
    torch_xla_is_imported,
    torch_xla_is_kept_out,
)
from spmdzero.backend.chips._chips import has_tpu_chips
from spmdzero.backend.protocols._arrays import Arrays
from spmdzero.backend.protocols._backend import Backend
from spmdzero.backend.protocols._compiler import Compiler
from spmdzero.backend.protocols._host_memory import HostMemory
from spmdzero.backend.protocols._programs import Counters, Flags, Lowering, Programs
from spmdzero.backend.protocols._runtime import Runtime
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroRuntimeError, SpmdZeroUsageError

_VARIABLE = "SPMDZERO_BACKEND"
_KEY = "spmd.backend"
_AUTO = "auto"
# Name of a backend and of the package that it needs -> the extra that installs it. `auto` takes
# the first that is installed.
_EXTRAS = {"jax": "spmdzero[jax]", "torch_xla": "spmdzero[xla]"}

_in_use: Backend | None = None
_reason = ""


def choose(name: str = _AUTO) -> Backend:
    """The backend of this process, chosen at the first call and the same ever after.

    Args:
        name: ``"torch_xla"``, ``"jax"``, or ``"auto"``, which takes the backend that was chosen
            before, else the one in the environment variable SPMDZERO_BACKEND, else torch_xla if
            this process has imported it, else JAX if it is installed, and torch_xla if not.

    Raises:
        SpmdZeroConfigError: the package is not installed, or this process uses another backend.
        SpmdZeroRuntimeError: no backend is installed, or the variable names none that is; or
            torch_tpu is loaded, and has the TPU.
    """
    global _in_use, _reason
    if _in_use is None:
        _refuse_torch_tpu()
        name, reason = _chosen(name)
        # Set the name only now: a backend that can't be imported is not in use.
        _in_use, _reason = _imported(name), reason
        if name == "jax":
            keep_torch_xla_out()
    elif name not in (_AUTO, _in_use.name):
        raise SpmdZeroConfigError(
            key=_KEY,
            value=name,
            reason=f"this process uses {_in_use.name} already ({_reason}), and a process has one "
            "backend",
            fix=f"Set {_VARIABLE}={name} before Python starts, or use a process for each.",
        )
    return _in_use


def current() -> Backend:
    """The backend in use; the first call chooses and imports it."""
    return choose() if _in_use is None else _in_use


def extra_of_backend() -> str:
    """The extra of spmdzero that installs the backend in use: ``"jax"`` or ``"xla"``."""
    return _EXTRAS[current().name].partition("[")[2].rstrip("]")


def is_chosen() -> bool:
    """Whether there is a backend in use: no engine is made before."""
    return _in_use is not None


def host_memory() -> HostMemory:
    """The host's memory of the backend in use, for a caller who knows that it has one."""
    memory = current().host_memory
    assert memory is not None
    return memory


def lowering() -> Lowering:
    """The `Lowering` of the backend in use, for a caller who knows that it has one."""
    found = current().lowering
    assert found is not None
    return found


def require_processes(environment: Mapping[str, str], *, platform: str) -> None:
    """Checks that processes with this environment can train one model.

    torch_xla's processes on the CPU can't.

    Args:
        environment: of the processes.
        platform: of their devices, such as ``"CPU"``.

    Raises:
        SpmdZeroUsageError: they would take torch_xla on the CPU: the environment chooses it, or
            nothing else is installed.
    """
    if platform.upper() != "CPU":
        return
    told = environment.get(_VARIABLE) or _AUTO
    if told == "torch_xla":
        raise SpmdZeroUsageError(f"{_VARIABLE}={told}: {alone_on_the_cpu()}")
    if told == _AUTO and _is_installed("torch_xla") and not _is_installed("jax"):
        raise SpmdZeroUsageError(f"torch_xla is the only backend installed. {alone_on_the_cpu()}")


def why_alone(platform: str) -> str | None:
    """Why processes of the backend in use can't train one model on `platform`; None if they can."""
    alone = current().name == "torch_xla" and platform == "CPU"
    return alone_on_the_cpu() if alone else None


def alone_on_the_cpu() -> str:
    """A message: why torch_xla's processes on the CPU can't train one model, and what to do."""
    first = "" if _is_installed("jax") else f"{_install('jax')}, and then "
    return (
        "torch_xla's runtime of the CPU connects no processes, so that each would train a model "
        f"of its own. JAX's does: {first}set {_VARIABLE}=jax for all hosts"
    )


def choice_in_words() -> str:
    """A text that says which backend is in use, why, and what chooses another."""
    name = current().name
    others = [other for other in _EXTRAS if other != name and _is_installed(other)]
    ways = [f'{_VARIABLE}={o} or "spmd": {{"backend": "{o}"}} chooses {o}' for o in others]
    return f"{name} ({'; '.join([_reason, *ways])})"


def _chosen(name: str) -> tuple[str, str]:
    """The name of the backend, and the reason for the choice."""
    if name != _AUTO:
        if not _is_installed(name):
            raise SpmdZeroConfigError(
                key=_KEY, value=name, reason=f"{name} is not installed", fix=f"{_install(name)}."
            )
        return name, f'"spmd": {{"backend": "{name}"}}'
    told = os.environ.get(_VARIABLE) or _AUTO
    if told != _AUTO:
        if told not in _EXTRAS:
            known = [*_EXTRAS, _AUTO]
            fix = did_you_mean(told, known) or f"It is one of {', '.join(known)}"
            raise SpmdZeroRuntimeError(f"{_VARIABLE}={told}: there is no such backend. {fix}")
        if not _is_installed(told):
            raise SpmdZeroRuntimeError(
                f"{_VARIABLE}={told}: {told} is not installed. {_install(told)}"
            )
        return told, f"{_VARIABLE}={told}"
    found = [option for option in _EXTRAS if _is_installed(option)]
    if not found:
        raise SpmdZeroRuntimeError(
            "spmdzero needs torch_xla or JAX, and neither is installed. "
            + ", or: ".join(map(_install, ("jax", "torch_xla")))
        )
    if len(found) > 1 and torch_xla_is_imported():
        # JAX's backend can't be in one process with it.
        return "torch_xla", "this process has imported it"
    return found[0], "installed" if len(found) > 1 else "the only one installed"


def _refuse_torch_tpu() -> None:
    asked = os.environ.get("PJRT_DEVICE") or os.environ.get("JAX_PLATFORMS")
    takes_tpu = "TPU" in asked.upper() if asked else has_tpu_chips()
    if takes_tpu and _torch_tpu.is_loaded():
        raise SpmdZeroRuntimeError(_torch_tpu.in_the_way())


def _install(name: str) -> str:
    return f"pip install '{_EXTRAS[name]}'"


def _is_installed(package: str) -> bool:
    """Whether `package` is installed; doesn't import it."""
    if sys.modules.get(package) is not None:
        return True
    if package == "torch_xla" and torch_xla_is_kept_out():
        return True
    spec = importlib.util.find_spec(package)
    # A folder of that name without an ``__init__.py`` is no package.
    return spec is not None and spec.origin is not None


def _imported(name: str) -> Backend:
    # Import it by name, because the backend's own files import this module.
    return importlib.import_module(f"spmdzero.backend.{name}").BACKEND


class _Part:
    """Stands for a part of the backend in use; importing it chooses no backend."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(current(), self._name), attribute)


runtime = cast(Runtime, _Part("runtime"))
arrays = cast(Arrays, _Part("arrays"))
programs = cast(Programs, _Part("programs"))
compiler = cast(Compiler, _Part("compiler"))
counters = cast(Counters, _Part("counters"))
flags = cast(Flags, _Part("flags"))
