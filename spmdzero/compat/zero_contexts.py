"""ZeRO-3's contexts. A parameter has its whole shape at every stage, so no script gathers it.

At stage 3 a parameter's parts rest on the devices between steps, which no script sees: a read gives
the whole parameter, and a write changes each device's part. Before there is an engine, `Init` has
placed the parts (`zero_init`), and `GatheredParameters` brings the whole parameter to the host.
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
from spmdzero.engine import trained_parameter
from spmdzero.state._homes import Home, bring, place


class ZeroParamType(enum.Enum):
    """DeepSpeed's types of parameter; here `is_zero_param` tells whether one rests as shards."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class GatheredParameters(contextlib.AbstractContextManager[None, None]):
    """Copies values written inside the context to the fp32 masters; reads don't need it.

    A parameter that `Init` has placed, and that no engine owns yet, is a plain tensor on the host
    inside the context.

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
        self._read = given if enabled else []
        self._stamps: dict[torch.Tensor, object] = {}
        self._brought: dict[nn.Parameter, Home] = {}

    def __enter__(self) -> None:
        for parameter in self._read:
            if isinstance(parameter, nn.Parameter) and (home := bring(parameter)) is not None:
                self._brought[parameter] = home
        self._stamps = {
            p: arrays.write_stamp(p) for p in self._given if trained_parameter(p) is not None
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        for parameter, home in self._brought.items():
            place(parameter, home)
        self._brought.clear()
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
    return (
        isinstance(parameter, torch.Tensor)
        and arrays.is_mine(parameter)
        and arrays.is_split(parameter)
    )


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yields the engine itself, whose module generates without hooks at every stage."""
    yield model
