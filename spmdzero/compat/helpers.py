"""Small helpers that scripts import from `deepspeed`, `deepspeed.utils` and other modules."""

import argparse
import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from spmdzero.backend import programs
from spmdzero.engine import ask_for_size
from spmdzero.errors import SpmdZeroUsageError

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Makes `func` name its operations in the compiled program's metadata."""

    @functools.wraps(func)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        with programs.scope(func.__qualname__):
            return func(*args, **kwargs)

    return named


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Returns `model.a.b` for ``"a.b"``."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Sets `model.a.b` for ``"a.b"``."""
    *path, last = module_name.split(".")
    setattr(functools.reduce(getattr, path, model), last, module)


class RepeatingLoader(Iterator[Any]):
    """An iterator over `loader` that starts again when it ends.

    Args:
        loader: anything that can be iterated again and again.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice(contextlib.AbstractContextManager["OnDevice", None]):
    """Creates tensors and parameters on `device` inside the context, floating ones in `dtype`.

    Args:
        dtype: dtype of floating tensors that are created without a dtype.
        device: the device; ``"meta"`` makes shapes only.
        enabled: whether the context has an effect.
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._before = torch.get_default_dtype()
        self._on = torch.device(device)

    def __enter__(self) -> "OnDevice":
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._on.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self.enabled:
            self._on.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)


def clone_tensors_for_torch_save(
    item: Any,
    device: torch.device | str = torch.device("cpu"),  # noqa: B008 (DeepSpeed's)
) -> Any:
    """A copy of nested lists, tuples and dicts whose tensors are clones on `device`.

    A clone's storage holds its own elements only, so files stay small.
    """
    if isinstance(item, torch.Tensor):
        target = torch.device(device)
        return item.detach().clone() if item.device == target else item.detach().to(target)
    if isinstance(item, list | tuple):
        return type(item)([clone_tensors_for_torch_save(value, device) for value in item])
    if isinstance(item, dict):
        return type(item)(
            {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
        )
    return item


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments that `deepspeed.add_config_arguments` adds, with its defaults.

    `--deepspeed` (and its old name `--deepscale`) is a flag for the script's own use;
    `--deepspeed_config` names the JSON that `initialize(args=...)` reads.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="accepted so that launch scripts keep working; initialize() needs no switch",
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed JSON file")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument(
        "--deepscale_config", default=None, type=str, help="old name of --deepspeed_config"
    )
    return parser


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Has `initialize` split the model's weights over `tp_size` devices; returns the model.

    As in DeepSpeed it only notes the size, as ``tensor_parallel.autotp_size`` of the config.

    Args:
        model: that `initialize` will be given.
        tp_size: number of devices that share a replica's work.
        dtype: has no effect: the config's sections bf16 and fp16 choose.
        config: has no effect, as in DeepSpeed.
        kwargs: ``tp_group`` is refused.

    Raises:
        SpmdZeroUsageError: a process group is given.
    """
    if kwargs.get("tp_group") is not None:
        raise SpmdZeroUsageError(
            "tp_model_init(tp_group=...): one process drives all devices, so that no group of "
            "processes shares weights. Leave it out"
        )
    ask_for_size(model, tp_size)
    return model


def set_autotp_mode(training: bool = False) -> None:
    """Accepts DeepSpeed's mode for training, and does nothing: `initialize` always trains.

    Raises:
        SpmdZeroUsageError: the mode for inference is asked for.
    """
    if not training:
        raise SpmdZeroUsageError(
            "set_autotp_mode(training=False): spmdzero trains, and has no inference engine. Call "
            "`engine.eval()` and `engine(...)`"
        )
