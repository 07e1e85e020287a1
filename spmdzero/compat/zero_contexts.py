"""ZeRO-3's contexts. A parameter has its whole shape at every stage, so no script gathers it.

At stage 3 a parameter's parts rest on the devices between steps, which no script sees: a read gives
the whole parameter, and a write changes each device's part.
"""

import contextlib
import enum
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from spmdzero._logging import log_once
from spmdzero.backend import arrays, runtime
from spmdzero.config import load_config
from spmdzero.engine import trained_parameter


class DeepSpeedTensorOverride(enum.Enum):
    """The properties of a tensor that DeepSpeed's `Init` changes."""

    dtype = enum.auto()
    device = enum.auto()


class ZeroParamType(enum.Enum):
    """DeepSpeed's types of parameter; here `is_zero_param` tells whether one rests as shards."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of a parameter; here each parameter is always AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init(contextlib.AbstractContextManager["Init", None]):
    """Builds a module in this process's memory, as without it; `initialize` makes the shards.

    It has DeepSpeed's signature. A given config is checked, so that refused keys are refused here
    and not only by `initialize`. All other arguments have no effect. A module that is too large for
    the host's memory is built by `OnDevice(device="meta")`, and gets its values from
    `initialize(..., weights=...)`.

    Raises:
        SpmdZeroConfigError: the config can't be honoured.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: list[DeepSpeedTensorOverride] = [  # noqa: B006 (DeepSpeed's default)
            DeepSpeedTensorOverride.dtype,
            DeepSpeedTensorOverride.device,
        ],
    ) -> None:
        given = config_dict_or_path if config_dict_or_path is not None else config
        if enabled and given is not None:
            load_config(given)

    def __enter__(self) -> "Init":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class GatheredParameters(contextlib.AbstractContextManager[None, None]):
    """Copies values written inside the context to the fp32 masters; reads don't need it.

    Args:
        params: a parameter or several, such as `module.parameters()`.
        modifier_rank: the process that writes; every process must write, or the hosts' parameters
            differ. None promises that no process writes.
        fwd_module: has no effect.
        enabled: whether the context has an effect.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._given = given if enabled and modifier_rank is not None else []
        self._stamps: dict[torch.Tensor, object] = {}

    def __enter__(self) -> None:
        self._stamps = {
            p: arrays.write_stamp(p) for p in self._given if trained_parameter(p) is not None
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        written = {p for p, stamp in self._stamps.items() if arrays.write_stamp(p) != stamp}
        owners = [trained_parameter(parameter) for parameter in written]
        for optimizer in {owner.training.optimizer for owner in owners if owner is not None}:
            if optimizer is not None:
                optimizer.refresh_masters(written)
                runtime.sync()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter is gathered for each operation that uses it, in any module."""
    log_once(
        "register_external_parameter() has no effect: a parameter is gathered where an operation "
        "uses it, whichever module that is in"
    )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, like `register_external_parameter`."""
    log_once("unregister_external_parameter() has no effect: none was registered")


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter rests as shards, with a part on each device.

    It is False for a parameter that `stage3_param_persistence_threshold` keeps whole; DeepSpeed's
    is True for every parameter of a stage 3 engine.
    """
    return isinstance(parameter, torch.Tensor) and arrays.is_split(parameter)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yields the engine itself, whose module generates without hooks at every stage."""
    yield model
