"""`deepspeed.initialize`, called by a user's script or by a client."""

import copy
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import spmdzero
from spmdzero.backend import choose, runtime
from spmdzero.backend.hosts import processes
from spmdzero.config import (
    backend_of,
    named_by,
    old_argument,
    one_of,
    read,
)
from spmdzero.engine import with_mpus_size
from spmdzero.errors import BatchSizesError, SpmdZeroConfigError
from spmdzero.integrations import _sentence_transformers, _trainer
from spmdzero.integrations._accelerate import require_counted
from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._lengths import heed_positions
from spmdzero.integrations._rows_of_devices import VARIABLE, of_a_device, refuse, replicas_under

_CLIENTS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "trl")
ROWS = "train_micro_batch_size_per_gpu"


@functools.wraps(spmdzero.initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """Calls `spmdzero.initialize`, and counts a client's batch sizes per process."""
    if _caller() in _CLIENTS:
        return initialize_for_client(*args, **kwargs)
    return spmdzero.initialize(*args, **kwargs)


def _caller() -> str:
    """The package that calls `deepspeed.initialize`, past a function that stands in its place.

    ms-swift puts one there at stage 3, and accelerate calls it.
    """
    codes, standing = set(), getattr(sys.modules.get("deepspeed"), "initialize", None)
    while standing is not None:
        codes.add(getattr(standing, "__code__", None))
        standing = getattr(standing, "__wrapped__", None)
    frame = sys._getframe(2)
    while frame.f_code in codes and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0]


def initialize_for_client(*args: Any, **kwargs: Any) -> Any:
    """Calls `spmdzero.initialize` for a `ClientEngine`, with the config of a process.

    Raises:
        SpmdZeroConfigError: this host's devices can't share the process's rows; or as in
            `spmdzero.initialize`.
        SpmdZeroUsageError: accelerate doesn't count the other hosts.
    """
    given = old_argument(kwargs.pop("config", None), kwargs.pop("config_params", None))
    mpu = kwargs.get("mpu")
    config = dict(read(with_mpus_size(one_of(given, named_by(kwargs.get("args"))), mpu)))
    if mpu is not None and ROWS in config:
        # accelerate multiplies by a number of processes that it takes for devices.
        config.pop("train_batch_size", None)
    choose(backend_of(config))
    processes.join()
    require_counted(runtime.process_count())
    _trainer.defer_reads()
    if "swift" in sys.modules:
        refuse("ms-swift has loaders of its own")
    if _only_evaluates(config, args, kwargs):
        # DeepSpeed makes no schedule without an optimizer, and the Trainer, which takes the
        # config's optimizer out to evaluate at stage 3, leaves the schedule in.
        config.pop("scheduler", None)
        if _rows_left_over(config) and not of_a_device():
            # It takes any number of rows, and accelerate fills in 1 where it has no loader.
            config[ROWS] = replicas_under(config)
            config.pop("train_batch_size", None)
    of_devices = config_of_devices(config)
    try:
        made = spmdzero.initialize(*args, config=of_devices, engine_class=ClientEngine, **kwargs)
    except BatchSizesError as error:
        if ROWS not in of_devices:
            raise
        raise BatchSizesError(
            key=error.key,
            value=error.value,
            reason=f"{error.reason}; micro is what each of this process's "
            f"{replicas_under(config)} devices takes of {ROWS}, {config[ROWS]} here",
            fix=error.fix,
        ) from None
    heed_positions(made[0].module)
    _sentence_transformers.settle(made[0].module)
    return made


def _only_evaluates(config: Mapping[str, Any], args: Sequence[Any], kwargs: Any) -> bool:
    """Whether there is no optimizer: `initialize` has it as its third argument."""
    return "optimizer" not in config and kwargs.get("optimizer") is None and len(args) < 3


def _rows_left_over(config: Mapping[str, Any]) -> bool:
    rows = config.get(ROWS)
    return isinstance(rows, int) and rows % replicas_under(config) != 0


def config_of_devices(config: Any) -> dict[str, Any]:
    """Converts a client's config, which counts the rows of a process, to rows of a device.

    Args:
        config: a config as `spmdzero.initialize` takes it.

    Raises:
        SpmdZeroConfigError: `train_micro_batch_size_per_gpu` is no multiple of the local devices,
            or the config can't be read.
    """
    config = copy.deepcopy(read(config))
    # accelerate writes infinity for "never" (`accelerate/utils/dataclasses.py`, `DeepSpeedPlugin`).
    if config.get("steps_per_print") == math.inf:
        del config["steps_per_print"]
    rows, devices = config.get(ROWS), replicas_under(config)
    if isinstance(rows, int) and of_a_device():
        # The client has multiplied by its processes.
        config.pop("train_batch_size", None)
    elif isinstance(rows, int):
        if rows % devices:
            raise SpmdZeroConfigError(
                key=ROWS,
                value=rows,
                reason="to this client they are the rows of a process (the loader's batch_size, "
                f"per_device_train_batch_size), which its {devices} devices can't share",
                fix=f"Take {max(rows // devices, 1) * devices} or another multiple of {devices}. "
                f"Or start by `spmdzero run --rows-per-device` ({VARIABLE}=device): they are the "
                "rows of a device then, as on GPUs.",
            )
        config[ROWS] = rows // devices
    return config
