"""Inputs and state of one forward, entered into the replica region."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from spmdzero.backend.forms._tree import Batch, map_tensors
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.protocols._region import Tracing, refuse_gradient_hooks
from spmdzero.backend.replica import _manual
from spmdzero.backend.replica._border import enter_batch, enter_parameter, enter_whole
from spmdzero.backend.replica._gathered import GatheredAtUse
from spmdzero.backend.replica._written import StateWatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entered:
    """The inputs and the state of a forward, in replica space.

    Attributes:
        args, kwargs: the inputs.
        state: parameters and buffers by name; the forward replaces entries in place.
        watch: compares that state with the one before.
        rows: number of a replica's rows -> number of batches that are joined in them.
        whole: whether an input is a batch that each replica has whole.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: dict[str, torch.Tensor]
    watch: StateWatch
    rows: dict[int, int]
    whole: bool


def enter(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    own: Tracing,
    *,
    mesh: Mesh,
    seed: int,
    gathered: GatheredAtUse | None,
) -> Entered:
    """Enters inputs and the state of `own` into the region of `mesh`; `seed` as in `_border`."""
    rows: dict[int, int] = {}
    unshared: list[Batch] = []

    def enter_input(_: str, tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, Batch):
            return enter_whole(tensor, mesh, seed)
        if not tensor.shared:
            unshared.append(tensor)
            return enter_whole(tensor.tensor, mesh, seed)
        whole, dim, joined = tensor.tensor, tensor.dim, tensor.joined
        own_rows = whole.shape[dim] // mesh.replicas
        # A model that pairs the rows of two batches returns as many rows as one of them has.
        rows.update({own_rows // joined: 1, own_rows: joined})
        return enter_batch(whole, dim, mesh, seed, joined=joined)

    state = _enter_state(own, mesh, seed, gathered)
    args, kwargs = map_tensors((args, dict(kwargs)), enter_input)
    return Entered(
        args=args,
        kwargs=dict(kwargs),
        state=state,
        watch=StateWatch(state, parameters=own.parameters),
        rows=rows,
        whole=bool(unshared),
    )


def _enter_state(
    own: Tracing, mesh: Mesh, seed: int, gathered: GatheredAtUse | None
) -> dict[str, torch.Tensor]:
    state = {}
    for name, parameter in own.parameters.items():
        if gathered is not None and name in gathered.layouts:
            there = functools.partial(gathered.enter, name=name, sink=own.sink)
        else:
            there = functools.partial(_manual.enter_copy, mesh=mesh)
        if parameter.requires_grad and torch.is_grad_enabled():
            refuse_gradient_hooks(name, parameter)
            state[name] = enter_parameter(parameter, name, mesh, seed, own.sink, there=there)
        else:
            state[name] = there(parameter.detach())
    return state | {name: _manual.enter_copy(each, mesh) for name, each in own.buffers.items()}
