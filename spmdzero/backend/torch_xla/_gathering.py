"""Gathers torch_xla's tensors for stage 3: see `spmdzero.backend.replica.Gathering`."""

import dataclasses
import functools
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from spmdzero.backend.protocols._mesh import PartitionSpec
from spmdzero.backend.torch_xla import arrays
from spmdzero.backend.torch_xla.mesh import DeviceMesh


class _Source:
    """Identifies a stand-in; lives as long as the stand-in or a view of it."""


@dataclasses.dataclass(frozen=True)
class _Step:
    """One view operation; `index` is the place of its result, None where it returns one tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.func(tensor, *self.args, **self.kwargs)
        return made if self.index is None else made[self.index]


@dataclasses.dataclass(frozen=True)
class _View:
    """A stand-in, or what view operations made of it."""

    source: _Source
    steps: tuple[_Step, ...] = ()


class XlaGathering:
    """Has GSPMD gather shards, and notes view operations, because XLA's tensors share no memory.

    Args:
        mesh: the devices.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._views = WeakIdKeyDictionary()

    def all_gather(
        self, local: torch.Tensor, *, axis: str, dim: int, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """The parts of all devices of a mesh axis, joined along `dim`; in replica space."""
        shape = list(local.shape)
        shape[dim] *= dict(self._mesh.spec.axes)[axis]
        spec: PartitionSpec = tuple(axis if i == dim else None for i in range(local.dim()))
        # There is no all-gather to be called; GSPMD makes one between these two annotations.
        whole = self._mesh.leave(local, spec, tuple(shape))
        return self._mesh.enter(whole, (None,) * local.dim())

    def stand_in(self, whole: torch.Tensor) -> Any:
        """Registers `whole` as a stand-in, and returns what `source_of` returns for it."""
        view = _View(_Source())
        self._views[_inner(whole)] = view
        return view.source

    def source_of(self, tensor: Any) -> Any:
        """An object that identifies the stand-in which `tensor` is or views; None for others."""
        view = self._view(tensor)
        return None if view is None else view.source

    def stamp(self, tensor: torch.Tensor) -> None:
        """None: a tensor that is written in place is a different one below functionalization."""

    def takes_view(self, func: Any) -> bool:
        """Whether `func` returns a view of its first operand, which XLA has as a copy."""
        return _takes_view(func)

    def note_view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Takes note of what `func` returned, if its operand is a stand-in or a view of one."""
        view = self._view(args[0])
        if view is None:
            return
        several = isinstance(made, (list, tuple))
        for index, tensor in enumerate(made if several else [made]):
            step = _Step(func, args[1:], kwargs, index if several else None)
            self._views[tensor] = _View(view.source, (*view.steps, step))

    def is_whole(self, tensor: Any) -> bool:
        """Whether `tensor` is a stand-in itself, not a view of it."""
        view = self._view(tensor)
        return view is not None and not view.steps

    def viewed_as(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The same view of `whole` that `tensor` is of its stand-in."""
        view = self._view(tensor)
        assert view is not None
        return functools.reduce(lambda made, step: step(made), view.steps, whole)

    def _view(self, tensor: Any) -> _View | None:
        return self._views.get(_inner(tensor)) if isinstance(tensor, torch.Tensor) else None


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return arrays.inner(tensor) if torch._is_functional_tensor(tensor) else tensor


@functools.cache
def _takes_view(func: Any) -> bool:
    """Whether it is, or is the copying form of, a view operation."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_copy")
    packet = getattr(torch.ops.aten, name, None)
    overload = None if packet is None else getattr(packet, func._overloadname, None)
    return func.is_view or (overload is not None and overload.is_view)
