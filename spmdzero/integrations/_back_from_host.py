"""Puts a module that a client has moved to the CPU back on the devices.

A client's device is the CPU here, so `module.to(accelerator.device)`, which does nothing on a GPU,
takes the module off the devices: diffusers' scripts do so to sample images between two epochs.
"""

import logging
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from spmdzero._logging import is_new
from spmdzero.backend import arrays
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")
_Registry = MutableMapping[str, Any]
# What a registry of a submodule has, or had, under a key.
_Place = tuple[_Registry, str, Any]


class BackFromHost:
    """Gives a module its parameters on the devices again, with the values that it has on the CPU.

    Args:
        training: a training whose module is on the devices.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        planned = {id(p) for p in training.state.parameters.values()}
        own = list(_own(training.module, "_parameters"))
        self._parameters = [place for place in own if id(place[2]) in planned]
        self._buffers = list(_own(training.module, "_buffers"))

    @torch.no_grad()
    def __call__(self) -> None:
        """Moves what `module.to` has moved; a tensor of another dtype or shape stays."""
        # At each call it looks at hundreds of places, of which nearly always none is another.
        others = [place for place in self._parameters if place[0].get(place[1]) is not place[2]]
        moved = [place for place in others if _is_moved(*place)]
        if not moved:
            # A forward may assign a buffer.
            self._buffers = [(where, key, where.get(key)) for where, key, _ in self._buffers]
            return
        module = self._training.module
        if is_new(("moved", type(module))):
            logger.warning(
                "%s was moved to the CPU, as .to(accelerator.device) does: what it computed there "
                "ran on this host's processor. It is on the devices again",
                type(module).__name__,
            )
        moved += [place for place in self._buffers if _is_moved(*place)]
        for registry, key, tensor in moved:
            found = registry[key]
            tensor.requires_grad_(found.requires_grad)
            # After a write the step starts from whole values: most are as they were.
            if not torch.equal(arrays.read(tensor.detach()), found):
                tensor.data.copy_(found)
            registry[key] = tensor


def _own(module: nn.Module, role: str) -> Iterator[_Place]:
    for part in module.modules():
        registry = getattr(part, role)
        yield from ((registry, key, t) for key, t in registry.items() if t is not None)


def _is_moved(registry: _Registry, key: str, tensor: Any) -> bool:
    found = registry.get(key)
    return (
        found is not tensor
        and found is not None
        and tensor is not None
        and found.device.type == "cpu"
        and not arrays.is_mine(found)
        and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    )
