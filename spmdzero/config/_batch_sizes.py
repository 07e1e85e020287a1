"""The three batch sizes; DeepSpeed derives the ones that the config leaves out."""

import math
from dataclasses import dataclass

from spmdzero.config._models import SpmdZeroConfig
from spmdzero.errors import BatchSizesError


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Batch sizes in samples, tied by ``train == micro * accumulation * dp_world_size``.

    Attributes:
        train: number of samples that one optimizer step consumes on all devices.
        micro: number of samples that one device sees in one forward.
        accumulation: number of micro-batches between two gradient accumulation boundaries.
    """

    train: int
    micro: int
    accumulation: int


def resolve_batch_sizes(
    config: SpmdZeroConfig, *, dp_world_size: int, platform: str = ""
) -> BatchSizes:
    """The batch sizes of a run on ``dp_world_size`` data-parallel devices.

    Args:
        platform: that of the devices, as of `runtime`; a message about CPUs tells how to pretend
            more of them.

    Sizes that the config leaves out follow by floor division, and the product is checked
    afterwards, as in DeepSpeed's runtime/config.py (``_set_batch_related_parameters``,
    ``_batch_assertion``).

    Raises:
        BatchSizesError: neither the train nor the micro size is given, or the product of
            the three numbers is not the train size.
    """
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if micro is None:
        if train is None:
            raise BatchSizesError(
                key="train_batch_size",
                value=config.source.get("train_batch_size"),
                reason="neither train_batch_size nor train_micro_batch_size_per_gpu is given",
                fix="Give at least one of the two.",
            )
        accumulation = accumulation or 1
        micro = train // dp_world_size // accumulation
    elif train is None:
        accumulation = accumulation or 1
        train = micro * accumulation * dp_world_size
    elif accumulation is None:
        accumulation = train // micro // dp_world_size

    product = micro * accumulation * dp_world_size
    if train != product:
        raise BatchSizesError(
            key="train_batch_size",
            value=train,
            reason=(
                f"train_batch_size ({train}) = micro ({micro}) x accumulation ({accumulation}) "
                f"x devices ({dp_world_size}) does not hold, the product is {product}"
            ),
            fix=_more_devices(config, train=train, dp_world_size=dp_world_size, platform=platform)
            + _fix(config, train=train, dp_world_size=dp_world_size),
        )
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)


def _fix(config: SpmdZeroConfig, *, train: int, dp_world_size: int) -> str:
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    unit = (micro or 1) * (accumulation or 1) * dp_world_size
    if micro and accumulation:
        other = f"train_batch_size {unit}, or leave it out and it follows from the other two."
        steps, left = divmod(train, micro * dp_world_size)
        if left or not steps:
            return f"Write {other}"
        keeps = f"Write gradient_accumulation_steps {steps}, which keeps the batch,"
        return f"{keeps} or {other}"
    below = train // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    return f"Write a train_batch_size that is a multiple of {unit}, such as {nearest}."


def _more_devices(config: SpmdZeroConfig, *, train: int, dp_world_size: int, platform: str) -> str:
    """How to have the CPU devices for which all three numbers are right; "" where none do."""
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if platform != "CPU" or not micro or not accumulation:
        return ""
    needed, left = divmod(train, micro * accumulation)
    if left or needed <= dp_world_size:
        return ""
    sizes = (config.mesh_axes.get(axis, 1) for axis in ("sequence", "tensor"))
    sharing = math.prod(size for size in sizes if size > 1)
    have, wanted = dp_world_size * sharing, needed * sharing
    there = "There is 1 CPU device" if have == 1 else f"There are {have} CPU devices"
    return (
        f"{there}; `spmdzero run --devices {wanted} SCRIPT` pretends {wanted}, as "
        f"PJRT_DEVICE=CPU CPU_NUM_DEVICES={wanted} in the environment does. "
    )
