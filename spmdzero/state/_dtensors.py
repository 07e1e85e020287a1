"""DTensors of what a training has on its devices; a rank of their mesh is a host."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from spmdzero.backend import runtime
from spmdzero.backend._quiet import without_gloos_lines
from spmdzero.backend.hosts import processes
from spmdzero.data._seeds import generators
from spmdzero.formats import Box, StoredTensor, assemble, box_shape, meet, whole_box
from spmdzero.plan import MeshSpec
from spmdzero.state._live_state import Held, held_tensors, live_tensors
from spmdzero.state._same_on_hosts import everyones
from spmdzero.state._still_placed import require_placed
from spmdzero.state._training import Training

Cut: TypeAlias = tuple[int | None, ...]
"""For each axis of the hosts' mesh the dim that is split over it; None for none."""


class DTensors:
    """Copies a training's tensors into DTensors on the CPU, and reads DTensors.

    One process drives all devices of a host and is one rank of torch's, so that the axes within a
    host are no axes of the `DeviceMesh`, and the local tensor is what the host's devices have
    together. Every host calls the methods, and makes the object.
    """

    def __init__(self, training: Training) -> None:
        # DTensors need a process group, also of one process; torch's own needs no port then.
        processes.join(named_port=None)
        grid = host_grid(training.mesh.spec, runtime.process_count())
        self.mesh = _mesh_of_hosts(dist.group.WORLD, tuple(grid.items()))
        self._small = training.plan.min_shard_elements

    def of(self, tensors: Mapping[str, StoredTensor]) -> dict[str, DTensor]:
        """The tensors by their names, each cut as `cuts` says."""
        cuts = self.cuts(tensors)
        return {name: self._of(tensor, cuts[name]) for name, tensor in tensors.items()}

    def cuts(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Cut | None]:
        """Name -> the first cut of which each host's devices hold the host's part.

        The whole tensor comes last, or first where it has fewer than ``min_shard_elements``. None
        is a tensor of whose cuts none is so: flattened, or with several parts on a host.
        """
        mine = {
            name: [cut for cut in self._possible(tensor.shape) if self._holds(tensor, cut)]
            for name, tensor in tensors.items()
        }
        every = everyones(mine)
        return {
            name: next((cut for cut in cuts if all(cut in of[name] for of in every)), None)
            for name, cuts in every[0].items()
        }

    def stored(self, value: torch.Tensor, own: Cut | None) -> StoredTensor:
        """A loaded tensor, of which each host reads its own part without the others.

        Args:
            value: a DTensor, or a tensor that each host has whole.
            own: the engine's cut of this tensor. One that is cut otherwise is made whole first.
        """
        if not isinstance(value, DTensor):
            return StoredTensor.of(value)
        if value.device_mesh != self.mesh or list(value.placements) != _placements(own, self.mesh):
            return StoredTensor.of(value.full_tensor())
        shape, local, cut = tuple(value.shape), value.to_local(), own or ()
        part = self._part(shape, cut)
        if part == whole_box(shape):
            return StoredTensor.of(local)
        whole = list[torch.Tensor]()

        def read(box: Box) -> torch.Tensor:
            if meet(box, part) == box:
                return assemble(box, [(part, local)], dtype=value.dtype)
            # What each device has whole every host reads, and in the same order.
            if not whole:
                whole.append(value.full_tensor())
            return assemble(box, [(whole_box(shape), whole[0])], dtype=value.dtype)

        return StoredTensor(shape=shape, dtype=value.dtype, read=read, pieces=(part,))

    def _of(self, tensor: StoredTensor, cut: Cut | None) -> DTensor:
        if cut is not None:
            local = tensor.read(self._part(tensor.shape, cut))
        else:
            every = everyones([(box, tensor.read(box)) for box in tensor.pieces])
            pieces = [piece for of_host in every for piece in of_host]
            local = assemble(whole_box(tensor.shape), pieces, dtype=tensor.dtype)
        return DTensor.from_local(
            local,
            self.mesh,
            _placements(cut, self.mesh),
            run_check=False,
            shape=torch.Size(tensor.shape),
            stride=torch.empty(tensor.shape, device="meta").stride(),
        )

    def _possible(self, shape: Sequence[int]) -> list[Cut]:
        whole: Cut = (None,) * self.mesh.ndim
        if self.mesh.size() == 1 or math.prod(shape) < self._small:
            return [whole]
        cuts = [
            tuple(dim if over else None for over in which)
            for which in itertools.product((True, False), repeat=self.mesh.ndim)
            for dim in range(len(shape))
        ]
        return [*dict.fromkeys((*cuts, whole))]

    def _holds(self, tensor: StoredTensor, cut: Cut) -> bool:
        """Whether this host's devices hold the host's part, which may not be empty in a cut."""
        part = self._part(tensor.shape, cut)
        met = [meet(box, part) for box in tensor.held]
        held = sum(math.prod(box_shape(box)) for box in met if box is not None)
        size = math.prod(box_shape(part))
        return held == size and (size > 0 or not any(dim is not None for dim in cut))

    def _part(self, shape: Sequence[int], cut: Cut) -> Box:
        """This host's part, as `torch.chunk` makes it along one axis of the mesh after another."""
        part = list(whole_box(shape))
        for axis, dim in enumerate(cut):
            if dim is not None:
                start, stop = part[dim]
                size = -(-(stop - start) // self.mesh.size(axis))
                begin = min(start + size * self.mesh.get_local_rank(axis), stop)
                part[dim] = begin, min(begin + size, stop)
        return tuple(part)


def live_dtensors(
    training: Training, held: Mapping[str, Held], *, dtype: torch.dtype | None = None
) -> dict[str, DTensor]:
    """Copies of tensors on the devices by their names, in `dtype` if one is given."""
    require_placed(training)
    tensors = live_tensors(training, held, rng=generators())
    if dtype is not None:
        tensors = {name: tensor.as_dtype(dtype) for name, tensor in tensors.items()}
    return DTensors(training).of(tensors)


def module_dtensors(training: Training, *, without: frozenset[str]) -> dict[str, Any]:
    """The module's state dict with DTensors for its tensors.

    Args:
        training: whose module it is.
        without: names that are left out.
    """
    module = training.module
    entries = {k: v for k, v in module.state_dict(keep_vars=True).items() if k not in without}
    named = {tensor: f"parameter/{name}" for name, tensor in module.named_parameters()}
    named |= {tensor: f"buffer/{name}" for name, tensor in module.named_buffers()}
    held = held_tensors(training)
    # Tied weights are entries of one tensor; an extra state, and what came since initialize, are
    # none of the engine's.
    names = {
        key: named[value]
        for key, value in entries.items()
        if torch.is_tensor(value) and named.get(value) in held
    }
    found = live_dtensors(training, {name: held[name] for name in dict.fromkeys(names.values())})
    return entries | {key: found[name] for key, name in names.items()}


def host_grid(mesh: MeshSpec, hosts: int) -> dict[str, int]:
    """Axis -> hosts along it, the slowest first, of hosts that have equal blocks of the mesh.

    Hosts along ``data`` have the same parts of parameters. There is one axis ``hosts`` where a host
    has all parts, or where there is one copy of them.
    """
    of_copy = hosts // mesh.data
    if mesh.data > 1 and of_copy > 1 and hosts % mesh.data == 0:
        return {"data": mesh.data, "fsdp": of_copy}
    return {"hosts": hosts}


@functools.lru_cache(maxsize=1)
def _mesh_of_hosts(_: dist.ProcessGroup | None, grid: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """The mesh of all processes; of a new group of them a new one."""
    # A mesh of two axes makes groups, so that one is kept.
    names, sizes = zip(*grid, strict=True)
    with without_gloos_lines():
        return DeviceMesh(
            "cpu", torch.arange(math.prod(sizes)).reshape(sizes), mesh_dim_names=names
        )


def _placements(cut: Cut | None, mesh: DeviceMesh) -> list[Placement]:
    dims = (None,) * mesh.ndim if cut is None else cut
    return [Replicate() if dim is None else Shard(dim) for dim in dims]
