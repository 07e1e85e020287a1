"""Where the numbers were taken."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("spmdzero", "torch", "torch_xla", "deepspeed", "jax", "jaxlib")


def describe() -> list[str]:
    """Versions and memory, one line each."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        f"Python {platform.python_version()}, {', '.join(_version(name) for name in _PACKAGES)}",
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}",
    ]


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def processor() -> str:
    """Its name, and the family and model that tell generations apart which share one."""
    told = dict(_of_the_first_core())
    name = told.get("model name", platform.machine())
    family, model = told.get("cpu family"), told.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name


def _of_the_first_core() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()
