"""Tells whether a step waits for compute, memory or network."""

from dataclasses import dataclass

from spmdzero.explain._chips import Chip


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time that each part of a chip needs for one step, seconds.

    Attributes:
        target: ``v5e:2x4``, or a chip's name if nothing was compiled for it.
        compiled: whether bytes and operations are the TPU compiler's own count. Otherwise they are
            the matrix products of the CPU program and the floor of ZeRO's traffic.
        compute: time of all operations at the peak rate of what is multiplied: bf16's, or int8's or
            fp8's where operands are such numbers.
        memory: time of every byte that the program reads or writes, at the HBM's rate; None if
            unknown.
        network: time of every byte that a device sends, at the ICI's rate, without overlap.
        intensity: operations per byte sent.
        tokens: present number of tokens per device and step.
        hiding_tokens: number of tokens per device and step from which compute hides network; None
            if there is no such number, as what the devices of a replica send each other grows with
            the tokens too.
    """

    target: str
    compiled: bool
    compute: float
    memory: float | None
    network: float
    intensity: float
    tokens: int
    hiding_tokens: int | None

    @property
    def bound(self) -> str:
        """The longest of the three times: ``"compute"``, ``"memory"`` or ``"network"``."""
        times = {"compute": self.compute, "memory": self.memory or 0.0, "network": self.network}
        return max(times, key=times.__getitem__)


def roofline(
    chip: Chip,
    *,
    target: str,
    flops: float,
    matmul_flops: float,
    bytes_accessed: float | None,
    wire_bytes: float,
    tokens: int,
    peak: float,
    shared_bytes: float = 0.0,
) -> Roofline:
    """The times of one step.

    Args:
        chip: the device's figures.
        target: the target's name.
        flops: operations of one device in one step.
        matmul_flops: operations of matrix products alone, which grow with the tokens; the
            optimizer's don't.
        bytes_accessed: bytes that one device reads and writes in one step; None if unknown.
        wire_bytes: bytes that one device sends in one step.
        tokens: number of tokens per device and step.
        peak: operations per second of the matrix products, see `Chip.peak_of`.
        shared_bytes: those of `wire_bytes` that go to devices of the same replica; they grow with
            the tokens.
    """
    network, shared = wire_bytes / chip.ici_rate, shared_bytes / chip.ici_rate
    # What is left of a token's compute to hide the bytes that don't grow.
    per_token = (matmul_flops / peak - shared) / tokens
    hiding = None if shared else 0
    if per_token > 0:
        hiding = round((network - shared) / per_token)
    return Roofline(
        target=target,
        compiled=bytes_accessed is not None,
        compute=flops / peak,
        memory=None if bytes_accessed is None else bytes_accessed / chip.hbm_rate,
        network=network,
        intensity=flops / wire_bytes if wire_bytes else float("inf"),
        tokens=tokens,
        hiding_tokens=hiding,
    )
