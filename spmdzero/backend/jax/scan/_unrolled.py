"""The blocks of a loop one by one, for a backward that is itself differentiated."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from spmdzero.backend.forms._tree import Skeleton, found
from spmdzero.backend.forms._with_graph import gradients_with_graph
from spmdzero.backend.jax.lazy._factories import OwnFactories
from spmdzero.backend.jax.lazy._quirks import JaxQuirks
from spmdzero.backend.replica._dispatch import RegionDispatch
from spmdzero.backend.replica._gathered import GatheredAtUse
from spmdzero.backend.replica._random import ReplicaRandom
from spmdzero.errors import ReplicaRegionError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tensors:
    """The tensors that the blocks ran on.

    Attributes:
        x: the first block's input.
        shared: tensors that are the same for each block.
        replica: the replica's number, `[1]` int32.
        parameters, buffers: of each block, by name.
        keys: the keys of each block's draws.
    """

    x: torch.Tensor
    shared: Sequence[torch.Tensor]
    replica: torch.Tensor
    parameters: Sequence[Mapping[str, torch.Tensor]]
    buffers: Sequence[Mapping[str, torch.Tensor]]
    keys: Sequence[Sequence[torch.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unrolled:
    """The called blocks, without their tensors.

    Attributes:
        blocks: each block, with the function that runs it.
        form: of each block's arguments after the first one.
        around: makes the context that was around the calls.
        upload: maps a CPU tensor to every replica's copy.
        gathered: gathers the parameters that are stored as shards; None where there are none.
    """

    blocks: Sequence[tuple[nn.Module, Callable[..., Any]]]
    form: Skeleton
    around: Callable[[], contextlib.AbstractContextManager[Any]]
    upload: Callable[[torch.Tensor], torch.Tensor]
    gathered: GatheredAtUse | None

    def gradients(self, tensors: Tensors, dy: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of x, of the shared tensors, and of the parameters, block by block.

        Args:
            tensors: those that the blocks ran on.
            dy: the gradient of the last block's output.
        """
        inputs, of_blocks = [tensors.x], list[list[torch.Tensor | None]]()
        with torch.enable_grad():
            for place in range(len(self.blocks) - 1):
                with self._running(tensors, place) as run:
                    inputs.append(run(inputs[-1], *tensors.shared, *self._own(tensors, place)))
        totals: list[torch.Tensor | None] = [None] * len(tensors.shared)
        for place in reversed(range(len(self.blocks))):
            with self._running(tensors, place) as run:
                given = inputs[place], *tensors.shared, *self._own(tensors, place)
                dx, *found = gradients_with_graph(run, given, dy)
            dy = torch.zeros_like(inputs[place]) if dx is None else dx
            totals = [_sum(*pair) for pair in zip(totals, found, strict=False)]
            of_blocks.insert(0, found[len(totals) :])
        return [dy, *totals, *(grad for found in of_blocks for grad in found)]

    def _own(self, tensors: Tensors, place: int) -> list[torch.Tensor]:
        return list(tensors.parameters[place].values())

    @contextlib.contextmanager
    def _running(self, tensors: Tensors, place: int) -> Iterator[Callable[..., torch.Tensor]]:
        """Yields a function that runs one block; its checkpoints can be recomputed inside."""
        (module, call), names = self.blocks[place], tensors.parameters[place]
        left, known = iter(tensors.keys[place]), dict[int, torch.Tensor]()

        def key(value: int) -> torch.Tensor:
            # A block's own checkpointing resets the generator, and draws its keys again.
            if value not in known:
                known[value] = next(left)
            return known[value]

        def run(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            end = len(tensors.shared)
            args, kwargs = self.form.filled(rest[:end])
            state = dict(zip(names, rest[end:], strict=True)) | dict(tensors.buffers[place])
            with _reparametrize_module(module, state):
                (y,) = found(call(module, x, *args, **kwargs), torch.Tensor)
            return y

        dispatch = RegionDispatch(
            random=ReplicaRandom(tensors.replica, key),
            read=_refuse_read,
            upload=self.upload,
            owner=module,
            quirks=JaxQuirks(),
            gathered=self.gathered,
        )
        state = torch.get_rng_state()
        try:
            with dispatch, OwnFactories(), self.around():
                yield run
        finally:
            # The keys are those of the forward, whose draws the generator has already counted.
            torch.set_rng_state(state)


def _sum(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total + more


def _refuse_read(_: torch.Tensor) -> torch.Tensor:
    raise ReplicaRegionError("a block of a loop reads a value from the devices")
