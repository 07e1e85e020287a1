"""Refuses 8 bits where there are none, or nothing is won by them."""

from collections.abc import Iterable

from spmdzero._logging import log_once
from spmdzero.backend import current, runtime
from spmdzero.backend.chips._chips import tpu_generation
from spmdzero.backend.chips._low_precision import slower_on
from spmdzero.config import SpmdZeroConfig
from spmdzero.errors import SpmdZeroConfigError

_KEY = "spmd.products"


def require_low_precision(settings: SpmdZeroConfig) -> None:
    """Checks the keys against the backend, and the chips that this process has.

    Raises:
        SpmdZeroConfigError: the backend has no such products, or they are slower on these chips.
    """
    products, backend, zero = settings.spmd.products, current(), settings.zero_optimization
    for key, why, moves in (
        ("zero_quantized_weights", "parameters are whole on each device", "gathers parameters"),
        ("zero_quantized_gradients", "all stages but 3 sum in full", "sums gradients"),
    ):
        if getattr(zero, key) and zero.stage < 3:
            log_once(f"{key} has no effect below stage 3, as in DeepSpeed: {why}")
        elif getattr(zero, key) and not backend.low_precision:
            raise SpmdZeroConfigError(
                key=f"zero_optimization.{key}",
                value=True,
                reason=f"the backend {backend.name} {moves} in their own dtype",
                fix='Leave the key out, or write "spmd": {"backend": "jax"}.',
            )
    if products is None:
        return
    if not backend.low_precision:
        raise SpmdZeroConfigError(
            key=_KEY,
            value=products.dtype,
            reason=f"the backend {backend.name} multiplies in the dtype that a tensor has",
            fix='Leave the key out, or write "spmd": {"backend": "jax"}.',
        )
    chip = tpu_generation() if runtime.platform() == "TPU" else None
    require_gain(settings, [] if chip is None else [chip])


def require_gain(settings: SpmdZeroConfig, chips: Iterable[str]) -> None:
    """Checks the key against chips.

    Raises:
        SpmdZeroConfigError: such products are slower on one of them.
    """
    if settings.spmd.products is None:
        return
    dtype = settings.spmd.products.dtype
    for chip in dict.fromkeys(chips):
        if slower := slower_on(chip, dtype):
            raise SpmdZeroConfigError(
                key=f"{_KEY}.dtype",
                value=dtype,
                reason=f"{slower}, by the cycles of a Llama block's products",
                fix="Leave the key out on this chip, or name the dtype that is quicker there.",
            )
