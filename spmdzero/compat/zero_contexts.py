"""ZeRO-3's contexts below stage 3: parameters are whole, so nothing has to be gathered."""

import contextlib
import enum
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from spmdzero.backend import arrays, runtime
from spmdzero.config import load_config
from spmdzero.engine import trained_parameter


class DeepSpeedTensorOverride(enum.Enum):
    """What `Init` would change about a tensor."""

    dtype = enum.auto()
    device = enum.auto()


class ZeroParamType(enum.Enum):
    """How DeepSpeed holds a parameter; NORMAL is the only one below stage 3."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter is whole; AVAILABLE is the only one below stage 3."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init(contextlib.AbstractContextManager["Init", None]):
    """Builds a module as without it: below stage 3 parameters are not partitioned.

    DeepSpeed's signature. A config that is given is checked, so that stage 3 is refused here and
    not only by `initialize`. Everything else is without meaning.

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
    """Parameters are whole already; what is written to them inside becomes their fp32 masters.

    Args:
        params: a parameter or several; a module's are `module.parameters()`.
        modifier_rank: which process writes; every process must, or the hosts' parameters differ.
            None promises that nothing is written.
        fwd_module: without meaning.
        enabled: False does nothing.
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
    """Nothing: a parameter that another module's forward uses is whole everywhere."""
