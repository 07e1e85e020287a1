"""Loops in recorded programs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun

from spmdzero.backend.jax._versions import is_on_host, moved, unwritten
from spmdzero.backend.jax.axes._merged_dims import LOOP, MergedDims
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.graph._graph_function import run_steps
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Space, record
from spmdzero.backend.jax.ops.matmul import in_loop
from spmdzero.backend.jax.scan._parts import Form
from spmdzero.backend.protocols._compiler import FoldedFunction


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LoopOp:
    """A graph that runs repeatedly, and in which nothing crosses replicas.

    Attributes:
        graph: of one iteration.
        times, backwards, arrangement: see `run_loop`.
        carried, sliced: the numbers of such inputs.
        fetched: number of the last of `sliced`, which are in the host's memory in programs for
            TPUs. A turn copies those of the next one to the devices beside what it computes.
        makes: see `Op`.
    """

    graph: Graph
    times: int
    backwards: bool
    arrangement: tuple[int, ...]
    carried: int
    sliced: int
    fetched: int = 0
    makes: Space | None = None

    @property
    def key(self) -> Any:
        """See `Op`."""
        how = self.times, self.backwards, self.arrangement, self.carried, self.sliced, self.fetched
        return (LOOP, self.graph.key, *how)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results as traced JAX arrays."""
        return self._scanned(arrays, lambda given: run_steps(self.graph, given))

    def divided(self, arrays: Sequence[jax.Array], *, rows: bool) -> list[jax.Array]:
        """The same, where devices share a replica's work.

        Args:
            arrays: the inputs; a stack may have two dims behind its first where torch has one.
            rows: as of `MergedDims`.

        Returns the results; a stack may have them, too.
        """

        def run(given: Sequence[jax.Array]) -> list[jax.Array]:
            split = MergedDims((), rows=rows)
            pairs = zip(self.graph.inputs, given, strict=True)
            inputs = [
                split.take(slot, array) if array.ndim > len(slot.shape) else array
                for slot, array in pairs
            ]
            results = run_steps(self.graph, inputs, split)
            stacks = [split.apart(slot.number) for slot in self.graph.outputs[self.carried :]]
            kept = zip(results[self.carried :], stacks, strict=True)
            return [
                *results[: self.carried],
                *(result if apart is None else apart for result, apart in kept),
            ]

        return self._scanned(arrays, run)

    def _scanned(
        self, arrays: Sequence[jax.Array], run: Callable[[Sequence[jax.Array]], list[jax.Array]]
    ) -> list[jax.Array]:
        end = self.carried + self.sliced
        start, sliced, whole = arrays[: self.carried], arrays[self.carried : end], arrays[end:]
        count = self.sliced - self.fetched
        on_host = sliced[count:]

        def body(*given: jax.Array) -> list[jax.Array]:
            inputs = [*given, *whole]
            with in_loop():
                return run([inputs[place] for place in self.arrangement])

        body, stacks = _with_stacks(body, start, sliced, times=self.times)

        def fetch(turn: Any) -> list[jax.Array]:
            slices = [jax.lax.dynamic_index_in_dim(a, turn, keepdims=False) for a in on_host]
            return [moved(one, host=False) for one in slices]

        def iteration(state: Any, slices: Any) -> tuple[Any, Any]:
            turn, arrived, carried, stacks = state
            results = body(*carried, *slices, *arrived)
            made = results[self.carried :]
            written = {
                place: jax.lax.dynamic_update_index_in_dim(stack, made[place], turn, 0)
                for place, stack in stacks.items()
            }
            turn = jnp.clip(turn + (-1 if self.backwards else 1), 0, self.times - 1)
            state = turn, fetch(turn), results[: self.carried], written
            return state, [None if place in stacks else one for place, one in enumerate(made)]

        first = jnp.int32(self.times - 1 if self.backwards else 0)
        (_, _, last, written), others = jax.lax.scan(
            iteration,
            (first, fetch(first), [*start], stacks),
            [*sliced[:count]],
            length=self.times,
            reverse=self.backwards,
        )
        return [*last, *(written.get(place, other) for place, other in enumerate(others))]


def _with_stacks(
    body: Callable[..., list[jax.Array]],
    carried: Sequence[jax.Array],
    sliced: Sequence[jax.Array],
    *,
    times: int,
) -> tuple[Callable[..., list[jax.Array]], dict[int, jax.Array]]:
    """The stacks that the loop writes itself, by result, and its traced body.

    JAX's own loop fills a stack with zeros first: 13 of 82 million cycles of a step of GPT-2's.
    Stacks in the host's memory are left to it.
    """
    slices = [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype) for stack in sliced]
    traced = jax.make_jaxpr(body)(*carried, *slices)
    stacks = {
        place: unwritten((times, *made.shape), made.dtype)
        for place, made in enumerate(traced.out_avals[len(carried) :])
        if not is_on_host(made)
    }
    return jaxpr_as_fun(traced), stacks


def run_loop(
    function: FoldedFunction,
    tensors: Sequence[torch.Tensor],
    *,
    times: int,
    backwards: bool,
    arrangement: tuple[int, ...],
    carried: tuple[Form, ...],
    sliced: tuple[Form, ...],
    fetched: int = 0,
    made: tuple[Form, ...],
) -> list[torch.Tensor]:
    """The last carried values, and stacks `[times, ...]` of the iterations' results.

    Args:
        function: one folded iteration; returns the carried values and its results.
        tensors: values carried into the first iteration, stacks `[times, ...]`, and tensors that
            are the same in each iteration.
        times: number of iterations.
        backwards: whether they run from the last slice to the first.
        arrangement: for each parameter of the function's program its index in the tensors.
        carried: forms of the first tensors, which each iteration replaces.
        sliced: forms of a slice of the stacks that follow.
        fetched: number of the last of these stacks, which are in the host's memory.
        made: forms of an iteration's results.
    """
    op = LoopOp(
        graph=function.body.graph,
        times=times,
        backwards=backwards,
        arrangement=arrangement,
        carried=len(carried),
        sliced=len(sliced),
        fetched=fetched,
    )
    forms = [(form.shape, form.dtype) for form in carried]
    forms += [((times, *form.shape), form.dtype) for form in made]
    values = tuple(value_of(tensor) for tensor in tensors)
    return [*map(over, record(op, values, {}, forms))]
