"""A running engine's state as DTensors, for `torch.distributed.checkpoint`."""

import dataclasses
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from spmdzero.backend import runtime
from spmdzero.backend.hosts import processes
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats import (
    RESET_AT,
    Box,
    HostState,
    StoredTensor,
    TrainingState,
    assemble,
    box_shape,
    host_bytes,
    host_from,
    meet,
    whole_box,
)
from spmdzero.state._across_hosts import everyones
from spmdzero.state._live_state import live_state
from spmdzero.state._restore import LoadOptions, restore
from spmdzero.state._tensor_matching import LoadReport
from spmdzero.state._training import Training

_Tree = dict[str, Any]
_WEIGHTS = ("parameter", "buffer")


class DistributedState:
    """The state of `training` under the names of `torch.distributed.checkpoint.state_dict`.

    It is torch's `Stateful`: `dcp.save({"engine": state})` and `dcp.load({"engine": state})` take
    it, and every host calls them. One rank of its `DeviceMesh` is a host, which drives all of its
    devices; the local tensor of a DTensor is what the host has, on the CPU.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        # DTensors need a process group, also of one process; torch's own needs no port then.
        processes.join(named_port=None)
        hosts = runtime.process_count()
        self._mesh = DeviceMesh("cpu", torch.arange(hosts), mesh_dim_names=("hosts",))

    def state_dict(self) -> _Tree:
        """A copy of the state in the host's memory.

        - ``model.<name>``: DTensor, the module's parameters and buffers in their dtypes.
        - ``optim.state.<name>.<slot>``: DTensor, the optimizer's states; ``master`` is fp32's copy
          of a parameter in another dtype, ``step`` a number of updates, fp32, 0-dim on the CPU.
        - ``optim.param_groups``: hyperparameters.
        - ``engine``: bytes of counters, schedule, loss scale and generators.

        A tensor whose parts on each host are its chunk of one dim is `Shard`; another one, also
        one that the engine has flattened, is `Replicate`.

        Raises:
            SpmdZeroUsageError: in the middle of gradient accumulation.
        """
        state = live_state(self._training)
        if state.host.accumulation is not None:
            raise SpmdZeroUsageError(
                "distributed_state().state_dict() in the middle of gradient accumulation: torch's "
                "names have none for its gradients. Call it after engine.step(), or use "
                "engine.save_checkpoint"
            )
        dims = self._dims(state)
        model, states = _Tree(), dict[str, _Tree]()
        resets = _resets(state.host)
        for key, tensor in state.tensors.items():
            role, _, name = key.partition("/")
            value = self._as_dtensor(tensor, dims[key])
            if role in _WEIGHTS:
                model[name] = value
            else:
                step = torch.tensor(float((state.host.applied or 0) - resets.get(name, 0)))
                states.setdefault(name, {"step": step})[role] = value
        found: _Tree = {"model": model | {k: model[n] for k, n in state.host.tied.items()}}
        if state.host.param_groups is not None:
            found["optim"] = {"state": states, "param_groups": state.host.param_groups}
        return found | {"engine": host_bytes(state.host)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> LoadReport:
        """Loads what `dcp.load` has read into a `state_dict()`.

        Args:
            state_dict: as of `state_dict`. ``model`` alone is enough: masters are made of it then,
                and the optimizer's states stay. Without ``engine`` the counters start at the
                number of updates in ``step``.

        Returns the tensors that it left out.

        Raises:
            SpmdZeroCheckpointError: it doesn't fit; nothing has changed.
        """
        tied = live_state(self._training).host.tied
        tensors = {
            f"{role}/{name}": self._stored(value)
            for role, name, value in _named(state_dict, self._training)
            if name not in tied or role not in _WEIGHTS
        }
        state = TrainingState(
            tensors=tensors, host=_host_state(state_dict), source="torch.distributed.checkpoint"
        )
        options = LoadOptions(
            optimizer="optim" in state_dict, module_only="optim" not in state_dict
        )
        return restore(self._training, state, options)

    def _dims(self, state: TrainingState) -> dict[str, int | None]:
        """Name -> the dim of which each host has its chunk; None where that isn't so on all."""
        mine = {key: _chunked_dim(tensor) for key, tensor in state.tensors.items()}
        every = everyones(mine)
        return {key: dim if all(of[key] == dim for of in every) else None
                for key, dim in every[0].items()}  # fmt: skip

    def _as_dtensor(self, tensor: StoredTensor, dim: int | None) -> DTensor:
        placement: Placement = Replicate() if dim is None else Shard(dim)
        if dim is not None:
            local = tensor.read(_chunk(tensor.shape, dim, runtime.process_index()))
        elif runtime.process_count() == 1:
            local = tensor.whole()
        else:
            every = everyones([(box, tensor.read(box)) for box in tensor.pieces])
            pieces = [piece for of_host in every for piece in of_host]
            local = assemble(whole_box(tensor.shape), pieces, dtype=tensor.dtype)
        return DTensor.from_local(
            local,
            self._mesh,
            [placement],
            run_check=False,
            shape=torch.Size(tensor.shape),
            stride=torch.empty(tensor.shape, device="meta").stride(),
        )

    def _stored(self, value: torch.Tensor) -> StoredTensor:
        """The tensor, of whose parts those of this host are read without the other hosts."""
        if not isinstance(value, DTensor):
            return StoredTensor.of(value)
        (placement,), local = value.placements, value.to_local()
        shape = tuple(value.shape)
        if not isinstance(placement, Shard) or runtime.process_count() == 1:
            return StoredTensor.of(local)
        own = _chunk(shape, placement.dim, runtime.process_index())
        whole = list[torch.Tensor]()

        def read(box: Box) -> torch.Tensor:
            if meet(box, own) == box:
                return assemble(box, [(own, local)], dtype=value.dtype)
            # What each device has whole every host reads, and in the same order.
            if not whole:
                whole.append(assemble(whole_box(shape), everyones((own, local)), dtype=value.dtype))
            return assemble(box, [(whole_box(shape), whole[0])], dtype=value.dtype)

        return StoredTensor(shape=shape, dtype=value.dtype, read=read, pieces=(own,))


def _chunk(shape: tuple[int, ...], dim: int, host: int) -> Box:
    """A host's part of a tensor that `Shard(dim)` splits, as `torch.chunk` does."""
    size = -(-shape[dim] // runtime.process_count())
    start = min(host * size, shape[dim])
    rows = (start, min(start + size, shape[dim]))
    return tuple(rows if i == dim else (0, n) for i, n in enumerate(shape))


def _chunked_dim(tensor: StoredTensor) -> int | None:
    if runtime.process_count() == 1:
        return None
    for dim in range(len(tensor.shape)):
        own = _chunk(tensor.shape, dim, runtime.process_index())
        held = [math.prod(box_shape(box)) for box in tensor.pieces if meet(box, own) == box]
        # The pieces don't overlap.
        if len(held) == len(tensor.pieces) and sum(held) == math.prod(box_shape(own)) > 0:
            return dim
    return None


def _resets(host: HostState) -> dict[str, int]:
    return {n: at for group in host.param_groups or () for n, at in group.get(RESET_AT, {}).items()}


def _named(given: Mapping[str, Any], training: Training) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields role, name and value of each tensor."""
    parameters = dict(training.module.named_parameters(remove_duplicate=False))
    for name, value in given["model"].items():
        yield "parameter" if name in parameters else "buffer", name, value
    for name, states in given.get("optim", {}).get("state", {}).items():
        yield from ((slot, name, value) for slot, value in states.items() if slot != "step")


def _host_state(given: Mapping[str, Any]) -> HostState:
    if "optim" not in given:
        return HostState()
    groups = given["optim"]["param_groups"]
    if "engine" in given:
        host = host_from(io.BytesIO(given["engine"]))
        return dataclasses.replace(host, param_groups=groups)
    steps = [int(states["step"]) for states in given["optim"]["state"].values()]
    applied = max(steps, default=0)
    return HostState(param_groups=groups, applied=applied, counters={"global_steps": applied})
