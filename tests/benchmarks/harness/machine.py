"""Where the numbers were taken."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("spmdzero", "torch", "torch_xla", "deepspeed", "jax", "jaxlib")


def describe() -> list[str]:
    """Versions, processor and memory, one line each."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        f"Python {platform.python_version()}, {', '.join(_version(name) for name in _PACKAGES)}",
        f"{os.cpu_count()} cores of {_processor()}, {memory:.0f} GiB, {platform.system()}",
    ]


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
