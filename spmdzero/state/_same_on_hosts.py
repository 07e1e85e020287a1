"""Checks that all hosts have the same config, versions, devices and model at the start."""

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.backend import arrays, current, runtime
from spmdzero.backend.hosts import processes
from spmdzero.backend.hosts.agreement import require_agreement
from spmdzero.config import SpmdZeroConfig
from spmdzero.formats._files import checksum

_PACKAGES = ("spmdzero", "torch", "torch_xla", "jax", "jaxlib")
# Keys that may differ between hosts: folders and log lines.
_OWN = ("tensorboard", "wandb", "csv_monitor", "comms_logger", "log_level", "spmd.compile_cache")


def require_same_settings(settings: SpmdZeroConfig) -> None:
    """Compares configs, versions and device counts.

    Raises:
        HostsDifferError: a config, a version or a device count differs.
    """
    own = {
        "backend": current().name,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "devices": f"{runtime.local_device_count()} x {runtime.platform()}",
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            own[package] = importlib.metadata.version(package)
    for key, value in _flat(settings.model_dump()):
        if not key.startswith(_OWN):
            own[key] = repr(value)
    require_agreement(
        "config, versions and devices",
        own,
        fix="Start every host with the same config, on the same packages and devices",
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def require_same_structure(model: nn.Module) -> None:
    """Compares names, shapes and dtypes of parameters and buffers.

    Raises:
        HostsDifferError: a name, a shape or a dtype differs.
    """
    own = {
        name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + (" trained" if tensor.requires_grad else "")
        for name, tensor in _tensors(model)
    }
    require_agreement("the model's structure", own, fix="Build the same model on every host")


def on_host(model: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that are in the host's memory."""
    return frozenset(name for name, tensor in _tensors(model) if tensor.device.type == "cpu")


def require_same_values(model: nn.Module, names: Iterable[str]) -> None:
    """Compares parameters and buffers by checksums.

    Args:
        model: the model with the tensors.
        names: names of the tensors to compare.

    Raises:
        HostsDifferError: a tensor differs.
    """
    if runtime.process_count() == 1:
        return
    wanted = set(names)
    own = {name: _digest(tensor) for name, tensor in _tensors(model) if name in wanted}
    require_agreement(
        "the model's values",
        own,
        digests=True,
        fix="Set the same seed before the model is built, load the same weights, or take those of "
        'host 0 with "spmd": {"broadcast": true}',
    )


@torch.no_grad()
def take_first_hosts_values(model: nn.Module, names: Iterable[str]) -> None:
    """Overwrites the named parameters and buffers in the host's memory by host 0's."""
    wanted = set(names)
    for name, tensor in _tensors(model):
        if name in wanted and tensor.numel():
            whole = tensor.detach().contiguous()
            processes.broadcast(_bytes(whole))
            tensor.copy_(whole)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _digest(tensor: torch.Tensor) -> str:
    host = arrays.read(tensor.detach()) if arrays.is_mine(tensor) else tensor.detach()
    return checksum(_bytes(host.contiguous()).numpy().data) if host.numel() else ""
