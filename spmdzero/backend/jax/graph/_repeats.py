"""Starts a step's program again though only its beginning is recorded: see `Repeats`."""

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import jax
import torch

from spmdzero.backend.jax.arrays import form_of
from spmdzero.backend.jax.graph._blame import UnloweredError
from spmdzero.backend.jax.graph._donation import arranged
from spmdzero.backend.jax.graph._execute import compilations, compiled
from spmdzero.backend.jax.graph._graph import Graph, Signature
from spmdzero.backend.jax.graph._listing import listing
from spmdzero.backend.jax.graph._replay import Replay
from spmdzero.backend.jax.hosts._apart import apart
from spmdzero.backend.jax.lazy._cells import Kept, pending_values
from spmdzero.backend.jax.lazy._dispatch import own_values
from spmdzero.backend.jax.lazy._generator import generator
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Value
from spmdzero.backend.protocols._arrays import Form


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    """Holds what is recorded, and the values that it and the rest of the step take.

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

    def text(self) -> str:
        """See `spmdzero.backend.Beginning`."""
        inner = (value for value in self.kept.values if value.node is not None)
        values = {id(value): value for value in (*self.roots, *inner)}
        return listing(Graph.of([*values.values()])[0])


def keep(tensors: Sequence[torch.Tensor], *, first: Callable[[], None] | None = None) -> Kept:
    """See `spmdzero.backend.Compiler`."""
    return Kept(own_values(tensors), first)


def tensors(kept: Kept) -> list[torch.Tensor]:
    """New tensors with the values that were kept."""
    return [over(value) for value in kept.values]


def beginning(kept: Kept) -> Beginning:
    """Returns what is recorded now, after which operations on the `kept` values follow."""
    roots = pending_values(but=kept)
    inner = [value for value in kept.values if value.node is not None]
    known = Signature()
    outputs = [known.number(value) for value in (*roots, *inner)]
    leaves = known.leaves
    given = {id(leaf): leaf for leaf in leaves}
    given |= {id(value): value for value in kept.values if value.node is None}
    places = {number: place for place, number in enumerate(given)}
    # A value that is not among them is pending.
    arrangement = [places.get(id(value), -1) for value in kept.values]
    forms = [(value.shape, value.dtype) for value in [*given.values()][len(leaves) :]]
    return Beginning(
        kept=kept,
        roots=tuple(roots),
        given=tuple(given.values()),
        key=(tuple(known.steps), *map(tuple, (outputs, arrangement, forms)), len(roots)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Repeat:
    """A program whose inputs are found in a like beginning, the state and the host's numbers.

    Attributes:
        replay: starts the program with `given` of the beginning, `reads`, the numbers and
            `constants`, one after the other; its results are those of `writes`.
        forms: shape, dtype and sharding of each input.
        same: indices in `reads`, each with that of the same value among `given` and `roots` of the
            beginning.
        constants: values that are the same at each start.
        roots: for each root of the beginning the number of the output that computes it.
        reads: see `spmdzero.backend.Repeat`.
    """

    replay: Replay
    forms: tuple[Form, ...]
    same: tuple[tuple[int, int], ...]
    constants: tuple[Value, ...]
    roots: tuple[int, ...]
    reads: tuple[int, ...]

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
        present = own_values(state)
        if [place for place, other in self.same if present[place] is not begun[other]]:
            return None
        pool = [*beginning.given, *present, *own_values(numbers), *self.constants]
        inputs = [pool[place] for place in self.replay.inputs]
        for value, form in zip(inputs, self.forms, strict=True):
            if (value.form or form_of(value)) != form:
                return None
        if jax.process_count() > 1 and self._shares(inputs, beginning.kept):
            return None
        beginning.kept.release()
        outputs = self.replay.started(inputs)
        for value, place in zip(beginning.roots, self.roots, strict=True):
            value.array, value.node = outputs[place], None
        made = self.replay.held(outputs, into)
        generator.advance()
        return made

    def _shares(self, inputs: Sequence[Value], kept: Kept) -> bool:
        """Whether a donated input has to be copied, in which other hosts would take no part."""
        here = Counter(map(id, kept.values))
        donated = [(inputs[place], own) for place, own in self.replay.donated]
        return any(value.holders - here[id(value)] > own for value, own in donated)


def build(
    beginning: Beginning,
    *,
    state: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    into: Sequence[int | None],
    numbers: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
) -> Repeat | None:
    """See `spmdzero.backend.Compiler`."""
    given, roots, old = beginning.given, beginning.roots, own_values(state)
    made, fixed = own_values(new), own_values([*numbers, *constants])
    if jax.process_count() > 1 and apart(roots):
        # A part of the beginning is a program of this host's own.
        return None
    # What a step holds of these values ends when it starts.
    ended = Counter(map(id, beginning.kept.values))
    for value, place in zip(made, into, strict=True):
        if place is not None:
            value.take_place_of(old[place])
            ended[id(old[place])] += 1
    if any(root.holders <= ended[id(root)] for root in roots):
        # It is overwritten at once, as a weight that the script has just changed: a step that is
        # recorded doesn't make it.
        return None
    # As `pending_values` has them: so a step that is recorded has the same program.
    wanted = sorted({id(value): value for value in (*roots, *made)}.values(), key=_serial)
    if len(compilations.grouped(wanted)) > 1:
        # A part of them is a program of another mesh.
        return None
    ready = arranged(wanted, compilations.mesh, ended=ended)
    outputs, leaves = [wanted[place] for place in ready.order], ready.leaves
    begun = {id(value): place for place, value in enumerate([*given, *roots])}
    taken = {id(leaf) for leaf in leaves}
    reads = [i for i, value in enumerate(old) if id(value) in taken or id(value) in begun]
    pool = [*given, *(old[i] for i in reads), *fixed]
    where = {id(value): place for place, value in reversed([*enumerate(pool)])}
    if not taken <= where.keys():
        return None
    try:
        program, _ = compiled(ready)
    except UnloweredError:
        # The step is recorded, and raises where values are asked for.
        return None
    number_of = {id(value): number for number, value in enumerate(outputs)}
    overwritten = {id(old[place]) for place in into if place is not None}
    replay = Replay(
        program=program,
        inputs=tuple([where[id(leaf)] for leaf in leaves]),
        donated=tuple([(n, id(leaves[n]) in overwritten) for n in ready.donated]),
        places=tuple([number_of[id(value)] for value in made]),
        shapes=tuple([(value.shape, value.dtype) for value in made]),
    )
    return Repeat(
        replay=replay,
        forms=tuple(map(form_of, leaves)),
        same=tuple([(n, begun[id(old[i])]) for n, i in enumerate(reads) if id(old[i]) in begun]),
        constants=tuple(fixed[len(numbers) :]),
        roots=tuple([number_of[id(root)] for root in roots]),
        reads=tuple(reads),
    )


_serial = operator.attrgetter("serial")
