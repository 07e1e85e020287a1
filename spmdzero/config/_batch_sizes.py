"""The three batch sizes; DeepSpeed derives the ones that the config leaves out."""

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


def resolve_batch_sizes(config: SpmdZeroConfig, *, dp_world_size: int) -> BatchSizes:
    """The batch sizes of a run on ``dp_world_size`` data-parallel devices.

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
            fix=_fix(config, train=train, dp_world_size=dp_world_size),
        )
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)


def _fix(config: SpmdZeroConfig, *, train: int, dp_world_size: int) -> str:
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    unit = (micro or 1) * (accumulation or 1) * dp_world_size
    if micro and accumulation:
        return f"Write train_batch_size {unit}, or leave it out and it follows from the other two."
    below = train // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    return f"Write a train_batch_size that is a multiple of {unit}, such as {nearest}."
