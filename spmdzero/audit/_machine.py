"""Checks of the machine: versions, devices, flags, host memory."""

import os
import re
from collections.abc import Iterator
from importlib import metadata

from spmdzero import _torch_tpu
from spmdzero.audit._report import Check
from spmdzero.backend import choice_in_words, extra_of_backend, flags, runtime
from spmdzero.config import SpmdZeroConfig

_PACKAGES = ("torch", "torch_xla", "jax", "jaxlib", "libtpu")
# With less memory, compiling a model of some hundred million parameters is likely to be killed.
_LOW_MEMORY = 4 * 2**30


def machine_checks(settings: SpmdZeroConfig | None) -> Iterator[Check]:
    """Yields the checks that need no engine; `settings` is an engine's config, or None."""
    yield Check(name="backend", status="ok", said=choice_in_words())
    yield from _versions()
    if _torch_tpu.is_installed():
        yield _beside_torch_tpu()
    yield _devices()
    yield from _flags(settings)
    yield _host_memory()


def _versions() -> Iterator[Check]:
    # Of the backend in use alone: JAX's extra pins none, as it takes every newer version.
    extra = re.compile(rf"([\w-]+)==([\w.]+).*extra == [\"']{extra_of_backend()}[\"']")
    pins = {
        found[1].replace("-", "_"): found[2]
        for line in metadata.requires("spmdzero") or ()
        if (found := extra.match(line))
    }
    installed = {name: _version(name) for name in _PACKAGES}
    shown = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    wrong = {
        name: pins[name]
        for name, version in installed.items()
        if version and name in pins and version.partition("+")[0] != pins[name]
    }
    install = " ".join(f"{name}=={version}" for name, version in wrong.items())
    yield Check.fine_unless(
        wrong,
        "versions",
        shown,
        fix=f"spmdzero is tested with other versions: pip install {install}",
    )
    if installed["libtpu"] is None and runtime.platform() != "TPU":
        yield Check(
            name="TPU compiler",
            status="note",
            said="libtpu not installed; only compiling for TPU without a TPU needs it",
            fix="pip install 'jax[tpu]', with JAX's backend",
        )


def _beside_torch_tpu() -> Check:
    name = f"torch_tpu {_version('torch_tpu') or ''}".rstrip()
    switch = _torch_tpu.SWITCH
    if _torch_tpu.is_loaded():
        return Check(
            name="TorchTPU",
            status="warning",
            said=f"{name} is loaded, which wants the TPU for itself",
            fix=f"set {switch}=0 before Python starts, or import spmdzero before torch",
        )
    said = f"{name} is installed and kept out of this process ({switch}={os.environ.get(switch)})"
    return Check(name="TorchTPU", status="ok", said=said)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Check:
    platform, count = runtime.platform(), runtime.device_count()
    processes = runtime.process_count()
    said = f"{count} {platform} device{'s' * (count > 1)}"
    if processes > 1:
        said += f", {runtime.local_device_count()} of them in this one of {processes} processes"
    if platform != "TPU" and runtime.has_tpu_chips():
        return Check(
            name="devices",
            status="warning",
            said=f"{said}, although this machine has TPU chips",
            fix="start the program with PJRT_DEVICE=TPU",
        )
    return Check.fine_unless(
        platform == "CPU" and count == 1,
        "devices",
        said,
        status="note",
        fix="`spmdzero run --devices 8 SCRIPT` pretends 8, to see what is sharded",
    )


def _flags(settings: SpmdZeroConfig | None) -> Iterator[Check]:
    given = flags.in_force()
    if runtime.platform() == "TPU":
        wanted = flags.flags_for(settings.spmd.xla_flags if settings else "none")
        other = {name: value for name, value in wanted.items() if given.get(name) != value}
        yield Check.fine_unless(
            other,
            "flags",
            ", ".join(f"{name}={value}" for name, value in given.items()) or "none",
            fix=f'"spmd": {{"xla_flags": ...}} asks for {other}, but LIBTPU_INIT_ARGS has the last '
            "word: take them out of it",
        )
    else:
        yield Check(name="flags", status="ok", said=" ".join(flags.cpu_flags()) or "none")
    debugging = [name for name in flags.DEBUGGING if os.environ.get(name, "0") not in ("", "0")]
    if debugging:
        yield Check(
            name="flags",
            status="warning",
            said=f"{', '.join(debugging)} set: what is traced is written out, which is slow",
            fix="unset them for training",
        )


def _host_memory() -> Check:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(n) * page for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return Check.fine_unless(
        free < _LOW_MEMORY,
        "host memory",
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        status="note",
        fix="compiling large models may need more",
    )
