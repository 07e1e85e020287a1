"""The private names of Lightning that the strategies need: those of release 2.6 only."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning import LightningModule, Trainer, __version__
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch import nn
from torchmetrics import Metric

from spmdzero.errors import SpmdZeroUsageError

_RELEASE = "2.6"


def require_release() -> None:
    """Raises SpmdZeroUsageError for a release that may keep its state in different places."""
    if not __version__.startswith(f"{_RELEASE}."):
        raise SpmdZeroUsageError(
            f"lightning {__version__}: spmdzero's strategy is made for lightning {_RELEASE}, whose "
            "modules and trainers it looks into. Install it by: pip install 'spmdzero[clients]'"
        )


def replaced_in_steps(
    module: LightningModule, *, trainer: Any, device: torch.device
) -> list[tuple[dict[str, Any], str, Any]]:
    """Values that steps should find in the module: a dict, a key, and the value for it."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            places.append((vars(part), "_device", device))
        if isinstance(part, LightningModule):
            places.append((vars(part), "_trainer", trainer))
    return places


def know_metrics(module: LightningModule) -> None:
    """Fills the table of metrics that the first `self.log(name, metric)` would add."""
    known = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
    module._metric_attributes = known or None


@contextlib.contextmanager
def inside_hook(module: LightningModule, name: str) -> Iterator[None]:
    """Makes `self.log` inside the context belong to the hook `name`."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before


def keep_samplers(trainer: Trainer) -> None:
    """Leaves the order of the rows to the user's own loaders: one process reads them all."""
    trainer._accelerator_connector.use_distributed_sampler = False


def ends_step(trainer: Trainer) -> bool:
    """Whether the micro-batch is the last of its step; the end of an epoch ends a step too."""
    return not trainer.fit_loop._should_accumulate()


def rows_of_loader(trainer: Trainer) -> int | None:
    """The `batch_size` of the training loader, or None if it has none."""
    source = trainer.fit_loop._data_source
    loader = source.dataloader() if source.is_defined() else None
    return getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def metrics_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """The path of each metric in `module`, the dict that holds it, and its key there."""
    for name, part in module._modules.items():
        path = f"{prefix}{name}"
        if hasattr(part, "update") and hasattr(part, "compute"):
            yield path, module._modules, name
        elif part is not None:
            yield from metrics_of(part, f"{path}.")


def tensors_of(module: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Each parameter and buffer of `module`: the dict that holds it, its key, and the tensor."""
    places = [held for part in module.modules() for held in (part._parameters, part._buffers)]
    return [(held, name, tensor) for held in places for name, tensor in held.items()]


def tie_as(placed: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Ties the tensors that were tied in `placed`: torch unties tensors moved off XLA devices."""
    now: dict[int, Any] = {}
    for held, name, tensor in placed:
        if tensor is not None:
            held[name] = now.setdefault(id(tensor), held[name])
