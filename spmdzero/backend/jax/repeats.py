"""Starts a step's program again though only its beginning is recorded: see `Repeats`."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend.jax._cells import Kept, pending_values
from spmdzero.backend.jax._dispatch import own_value
from spmdzero.backend.jax._execute import Executable, start
from spmdzero.backend.jax._generator import generator
from spmdzero.backend.jax._graph import Graph
from spmdzero.backend.jax._memory import copied
from spmdzero.backend.jax._tensor import over
from spmdzero.backend.jax._values import Space, Value
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax._writes import holding


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    """What is recorded, and the values that it and the rest of the step take.

    Attributes:
        kept: what the rest takes.
        roots: the pending values of live tensors.
        given: the inputs of the recorded operations, and computed values of `kept`.
        key: see `spmdzero.backend.Beginning`.
    """

    kept: Kept
    roots: tuple[Value, ...]
    given: tuple[Value, ...]
    key: Hashable


def keep(tensors: Sequence[torch.Tensor], *, first: Callable[[], None] | None = None) -> Kept:
    """See `spmdzero.backend.Repeats`."""
    return Kept([own_value(tensor) for tensor in tensors], first)


def tensors(kept: Kept) -> list[torch.Tensor]:
    """New tensors with the values that were kept."""
    return [over(value) for value in kept.values]


def beginning(kept: Kept) -> Beginning:
    """What is recorded now, after which operations on the `kept` values follow."""
    roots = pending_values(but=kept)
    inner = [value for value in kept.values if value.node is not None]
    graph, leaves = Graph.of([*roots, *inner])
    given = {id(leaf): leaf for leaf in leaves}
    given |= {id(value): value for value in kept.values if value.node is None}
    places = {number: place for place, number in enumerate(given)}
    # A value that is not among them is pending.
    arrangement = tuple([places.get(id(value), -1) for value in kept.values])
    forms = tuple([(value.shape, value.dtype) for value in [*given.values()][len(leaves) :]])
    return Beginning(
        kept=kept,
        roots=tuple(roots),
        given=tuple(given.values()),
        key=(graph.key, len(roots), arrangement, forms),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Repeat:
    """A program whose inputs are found in a like beginning, the state and the host's numbers.

    Attributes:
        program: the program.
        inputs: for each input its index among `given` of the beginning, `reads`, the numbers and
            `constants`, one after the other.
        shardings: of each input.
        donated: numbers of the inputs that are donated.
        replaced: those among them whose tensor the program writes.
        same: index in `reads` -> that of the same value among `given` and `roots` of the beginning.
        constants: tensors that are the same at each start.
        roots: for each root of the beginning the number of the output that computes it.
        reads, writes: see `spmdzero.backend.Repeat`.
        results: for each of `writes` the number of its output, its shape and its dtype.
    """

    program: Executable
    inputs: tuple[int, ...]
    shardings: tuple[Any, ...]
    donated: tuple[int, ...]
    replaced: frozenset[int]
    same: Mapping[int, int]
    constants: tuple[torch.Tensor, ...]
    roots: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]

    def start(
        self,
        beginning: Beginning,
        *,
        state: Sequence[torch.Tensor],
        numbers: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor] | None:
        """See `spmdzero.backend.Repeat`."""
        begun = [*beginning.given, *beginning.roots]
        present = [own_value(tensor) for tensor in state]
        if any(present[place] is not begun[other] for place, other in self.same.items()):
            return None
        fixed = [own_value(tensor) for tensor in (*numbers, *self.constants)]
        pool = [*beginning.given, *present, *fixed]
        inputs = [pool[place] for place in self.inputs]
        arrays = [value.array for value in inputs]
        for array, sharding in zip(arrays, self.shardings, strict=True):
            if array is None or array.sharding != sharding:
                return None
        beginning.kept.release()
        for place in self.donated:
            if inputs[place].holders > (place in self.replaced):
                # Another tensor shares this memory.
                with wide_numbers():
                    arrays[place] = copied(arrays[place])
        results = self.program.run(arrays)
        for place in self.donated:
            inputs[place].array = None
        for value, place in zip(beginning.roots, self.roots, strict=True):
            value.array, value.node = results[place], None
        made = [
            holding(Value(shape, dtype, Space.GLOBAL, array=results[place]), target)
            for (place, shape, dtype), target in zip(self.results, into, strict=True)
        ]
        generator.advance()
        return made


def learn(
    beginning: Beginning,
    *,
    before: Kept,
    after: Sequence[torch.Tensor | None],
    numbers: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
) -> Repeat | None:
    """Starts everything that is recorded, and returns what can start it again, if it can."""
    old = before.values
    given, roots = beginning.given, beginning.roots
    fixed = [own_value(tensor) for tensor in (*numbers, *constants)]
    # They must not keep the program from overwriting the values.
    before.release()
    beginning.kept.release()
    started = start(pending_values())
    generator.advance()
    if started is None:
        return None
    new = [None if tensor is None else own_value(tensor) for tensor in after]
    taken = {id(leaf) for leaf in started.leaves}
    begun = {id(value): place for place, value in enumerate([*given, *roots])}
    reads = [i for i, value in enumerate(old) if id(value) in taken or id(value) in begun]
    writes = [i for i, v in enumerate(new) if v is not None and (i >= len(old) or v is not old[i])]
    pool = [*given, *(old[i] for i in reads), *fixed]
    where = {id(value): place for place, value in reversed([*enumerate(pool)])}
    made = {id(value): number for number, value in enumerate(started.roots)}
    results = [value for i in writes if (value := new[i]) is not None]
    if not (
        all(id(leaf) in where for leaf in started.leaves)
        # What lives elsewhere, as in a variable of the script, would not be computed the next time.
        and {id(value) for value in [*roots, *results]} == made.keys()
    ):
        return None
    overwritten = {id(old[i]) for i in writes if i < len(old)}
    return Repeat(
        program=started.program,
        inputs=tuple([where[id(leaf)] for leaf in started.leaves]),
        shardings=tuple([array.sharding for array in started.arrays]),
        donated=started.donated,
        replaced=frozenset(n for n in started.donated if id(started.leaves[n]) in overwritten),
        same={place: begun[id(old[i])] for place, i in enumerate(reads) if id(old[i]) in begun},
        constants=tuple(constants),
        roots=tuple([made[id(root)] for root in roots]),
        reads=tuple(reads),
        writes=tuple(writes),
        results=tuple([(made[id(value)], value.shape, value.dtype) for value in results]),
    )
