"""Activation checkpointing, under DeepSpeed's names."""

import logging
from collections.abc import Callable
from typing import Any

from spmdzero.backend import current
from spmdzero.config import load_config
from spmdzero.errors import SpmdZeroUsageError

logger = logging.getLogger("spmdzero")
_configured = False
_in_cpu = False


def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` and drops its activations; backward runs it again.

    Its inputs rest in the host's memory until backward if `configure` was called so, or if the
    engine's config has ``"activation_checkpointing": {"cpu_checkpointing": true}``. It works inside
    and outside of an engine's module, with the same random numbers in both runs.
    torch.utils.checkpoint does so within an engine's module; elsewhere XLA merges its two runs.

    Returns what `function` returns.
    """
    way = current().recomputed_from_host if _in_cpu else current().recomputed
    return way(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Does what `checkpoint` does, which is not reentrant either."""
    return checkpoint(function, *args)


def configure(
    mpu_: None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Checks DeepSpeed's options; `checkpoint` needs none of them.

    Args:
        mpu_: None; there is no model parallelism.
        deepspeed_config: path of a JSON, or its dict; checked as `initialize` checks it.
        checkpoint_in_cpu: whether inputs of checkpointed functions rest in the host's memory until
            backward; None takes the config's ``cpu_checkpointing``.
        partition_activations: has no effect, as in the config: it splits activations over
            model-parallel ranks, and there are none.
        contiguous_checkpointing, num_checkpoints, synchronize, profile: have no effect, as XLA
            allocates and schedules.

    Raises:
        SpmdZeroUsageError: an option that can't be honoured.
        SpmdZeroConfigError: a key of the config that can't be honoured.
    """
    global _configured, _in_cpu
    if mpu_ is not None:
        raise SpmdZeroUsageError(
            "checkpointing.configure(mpu_=...): there is no model parallelism. Pass None"
        )
    _in_cpu = bool(checkpoint_in_cpu)
    if deepspeed_config is not None:
        section = load_config(deepspeed_config).activation_checkpointing
        if checkpoint_in_cpu is None:
            _in_cpu = section.cpu_checkpointing
    options = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }
    given = [name for name, value in options.items() if value]
    if given:
        logger.info("without meaning for checkpointing under XLA: %s", ", ".join(given))
    _configured = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured


def reset() -> None:
    """Does nothing: no buffers are kept between steps."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Does nothing: there are no model-parallel ranks to split activations over."""


def set_num_layers(nlayers: int | None) -> None:
    """Does nothing: DeepSpeed sizes a contiguous buffer by `nlayers`, here XLA allocates."""


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """0: there is no tensor parallelism."""
    return 0
