"""TPU generations of which figures are published, and for which no libtpu compiles yet."""

import re
from dataclasses import dataclass

# As people write them: "tpu8t:4x4", "8t", "v8t-16", "TPU 8t".
_NAME = re.compile(r"(?:tpu|v)?[ _-]?(?P<kind>8[ti])\b", re.IGNORECASE)
# The newest that was tried.
_LIBTPU = "0.0.52"


@dataclass(frozen=True, kw_only=True)
class Announced:
    """The figures of a chip of a generation to come, by jax/_src/tpu_info.py of JAX 0.12.

    That file marks one of 8t's figures as to be confirmed, and no page of Google Cloud's has them.

    Attributes:
        name: ``tpu8t`` or ``tpu8i``.
        bf16_flops: peak bf16 operations per second.
        fp8_flops: peak fp8 operations per second.
        hbm_bytes: memory, bytes.
        hbm_rate: bytes per second between memory and chip.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    hbm_bytes: float
    hbm_rate: float

    @property
    def refused(self) -> str:
        """Why there is no topology of it, and the nearest that there is."""
        return (
            f"no libtpu up to {_LIBTPU} compiles for {self.name} (by JAX's sources, partly "
            f"unconfirmed, a chip of {self.bf16_flops / 1e12:,.0f} TFLOP/s in bf16, "
            f"{self.fp8_flops / 1e12:,.0f} in fp8, {self.hbm_bytes / 1e9:.0f} GB at "
            f"{self.hbm_rate / 1e9:,.0f} GB/s). The nearest that it compiles for is tpu7x, such as "
            "tpu7x:2x2x1"
        )


ANNOUNCED = {
    chip.name: chip
    for chip in (
        Announced(
            name="tpu8t", bf16_flops=996e12, fp8_flops=5977e12, hbm_bytes=231e9, hbm_rate=6400e9
        ),
        Announced(
            name="tpu8i", bf16_flops=1101e12, fp8_flops=8808e12, hbm_bytes=309e9, hbm_rate=8600e9
        ),
    )
}


def announced(name: str) -> Announced | None:
    """The generation with which the name of a topology begins, None if it is none of these."""
    found = _NAME.match(name)
    return None if found is None else ANNOUNCED[f"tpu{found['kind'].lower()}"]
