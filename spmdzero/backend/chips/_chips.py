"""TPU chips of this machine that the kernel shows, before anything starts them."""

import os
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_MAKER = "0x1ae0"
# The ids that jax 0.12 knows (jax/_src/hardware_utils.py); torch_xla has those up to tpu7x without
# the names.
_GENERATIONS = {
    "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x",
    "0x007c": "tpu8t", "0x0083": "tpu8i",
}  # fmt: skip


def has_tpu_chips() -> bool:
    """Whether the kernel shows TPU chips."""
    return os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")


def tpu_generation() -> str | None:
    """The generation of this machine's TPU chips, such as ``v5e``; None if none or unknown."""
    for vendor in sorted(_PCI.glob("*/vendor")):
        if vendor.read_text().strip() == _MAKER:
            device = vendor.with_name("device").read_text().strip()
            if device in _GENERATIONS:
                return _GENERATIONS[device]
    return None
