"""Comparisons of hosts at the start, and decisions that they make together."""

import contextlib
import importlib.metadata
import logging
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from spmdzero.backend import arrays, current, runtime
from spmdzero.backend.hosts import processes
from spmdzero.backend.hosts.agreement import require_agreement
from spmdzero.backend.hosts.processes import gather_objects
from spmdzero.config import SpmdZeroConfig
from spmdzero.errors import SpmdZeroCheckpointError, UsageAssertionError
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


_Value = TypeVar("_Value")
logger = logging.getLogger("spmdzero")


@contextlib.contextmanager
def together(file: Path, *, doing: str) -> Iterator[None]:
    """Makes every process raise if one raises inside the context; all processes must enter it.

    Args:
        file: the file in the error of the other processes.
        doing: the participle in their message, such as ``"saved"``.

    Raises:
        SpmdZeroCheckpointError: another process raised; it has that process's message.
    """
    try:
        yield
    except Exception as error:
        everyones(str(error) or type(error).__name__)
        raise
    for process, said in enumerate(everyones("")):
        if said:
            raise SpmdZeroCheckpointError(
                file=file, reason=f"can't be {doing}: process {process}: {said}"
            )


def everyones(value: _Value) -> list[_Value]:
    """The values with which all processes call this, in their order; in main threads only."""
    return [value] if runtime.process_count() == 1 else gather_objects(value)


def require_one_tag(folder: Path, tags: list[str | None]) -> None:
    """Returns if all processes are about to load the same tag, or none.

    Otherwise some would train from a different state, or wait for processes that found nothing to
    load. None is the tag of a process that finds no file `latest`.

    Raises:
        SpmdZeroCheckpointError: the tags differ.
    """
    if len(set(tags)) > 1:
        raise SpmdZeroCheckpointError(
            file=folder,
            reason=f"the processes would load the tags {tags}, None where there is no latest",
            fix="Name the same tag in every process, in a folder that all of them see",
        )


def agreed_tag(tags: list[str], *, mine: str, validation: str) -> str:
    """The first process's tag, which all use; a process with a different tag logs a warning.

    Raises:
        UsageAssertionError: in every process, if tags differ and `validation` is ``"FAIL"``.
    """
    if validation == "FAIL" and len(set(tags)) > 1:
        raise UsageAssertionError(
            f'the processes save the tags {tags}, and "tag_validation" is "FAIL": name the same '
            "tag in every process"
        )
    if validation == "WARN" and mine != tags[0]:
        logger.warning(
            "this process saves the tag %r, the first one %r, which is used", mine, tags[0]
        )
    return tags[0]
