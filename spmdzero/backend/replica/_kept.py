"""Tensors that a forward puts into attributes of its module, where the next forward finds them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spmdzero.backend._current import arrays
from spmdzero.backend._old_norms import old_norm_error, old_norms
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.replica._around import Around
from spmdzero.errors import ReplicaRegionError


class KeptTensors:
    """Watches the tensors on the devices that are plain attributes or buffers of a submodule.

    Args:
        module: as it is before a forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = {id(held): dict(held) for held, _ in _places(module)}
        self._stamps = {
            (prefix, name): arrays.write_stamp(tensor) for _, prefix, name, tensor in _kept(module)
        }

    def leave(self, mesh: Mesh, around: Around) -> None:
        """Makes what a forward has put or written there global, if all replicas have the same.

        Raises:
            ReplicaRegionError: a tensor may differ between replicas, or carries a gradient.
        """
        left: dict[int, torch.Tensor] = {}
        for held, prefix, name, tensor in list(_kept(self._module)):
            new = self._is_new(held, name)
            written = arrays.write_stamp(tensor) != self._stamps.get((prefix, name))
            if not new and not (written and around.keeps_tensors):
                continue
            if tensor.requires_grad or not around.is_same_everywhere(tensor):
                self._refuse(prefix, name)
            if id(tensor) not in left:
                whole = mesh.leave(tensor, (None,) * tensor.dim(), tuple(tensor.shape))
                left[id(tensor)] = mesh.whole(whole)
            if new:
                held[name] = left[id(tensor)]
            else:
                arrays.set_value(tensor, left[id(tensor)])

    def undo(self) -> None:
        """Takes away what a forward has put there, before it runs once more."""
        for held, _, name, _ in list(_kept(self._module)):
            if self._is_new(held, name):
                before = self._attributes[id(held)]
                if name in before:
                    held[name] = before[name]
                else:
                    del held[name]

    def _is_new(self, held: dict[str, Any], name: str) -> bool:
        return self._attributes.get(id(held), {}).get(name) is not held[name]

    def _refuse(self, prefix: str, name: str) -> None:
        path = f"{prefix}.{name}" if prefix else name
        norm = old_norms(self._module.get_submodule(prefix)).get(name)
        if norm is not None:
            raise ReplicaRegionError(old_norm_error(path, norm))
        raise ReplicaRegionError(
            f"forward keeps a tensor in the attribute {path!r}. It belongs to one replica, whose "
            "rows or draws it is computed of, and can't be used outside of the forward: return it, "
            "or register a buffer before initialize and write to it"
        )


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The dicts that hold attributes and buffers of a submodule, and its path."""
    for prefix, part in module.named_modules():
        yield vars(part), prefix
        yield part._buffers, prefix


def _kept(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """The dict that holds a tensor, the submodule's path, the key in the dict, and the tensor."""
    for held, prefix in _places(module):
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and arrays.is_mine(value):
                yield held, prefix, name, value
