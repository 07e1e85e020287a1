"""Chooses which inputs of a program donate their memory to which outputs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh

from spmdzero.backend.jax.graph._by_mesh import mesh_of
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.graph._graph_function import marked_spec
from spmdzero.backend.jax.lazy._values import Value


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Arranged:
    """A graph whose outputs are in the order in which they take over memory.

    Attributes:
        graph: the operations.
        mesh: over which it runs.
        leaves: its inputs.
        order: for each output its index among the requested values.
        shardings: of the outputs, None for the compiler's choice.
        donated: numbers of the inputs that are donated.
    """

    graph: Graph
    mesh: Mesh
    leaves: list[Value]
    order: list[int]
    shardings: list[Any]
    donated: tuple[int, ...]


def arranged(
    roots: Sequence[Value],
    latest: Mesh,
    *,
    donate: bool = True,
    ended: Mapping[int, int] = MappingProxyType({}),
) -> Arranged:
    """The graph that computes `roots`.

    Args:
        roots: pending values.
        latest: the mesh over which the graph runs, if none of its operations has one.
        donate: whether inputs that no tensor holds any more are donated.
        ended: id of a value -> how many of its holders let it go when the graph is started.
    """
    graph, leaves = Graph.of(roots)
    mesh = mesh_of(graph.steps, latest)
    shardings = marked_spec(graph, mesh)
    given = _given_away(graph, leaves, roots, shardings, ended) if donate else {}
    order = in_order(given, len(roots))
    return Arranged(
        graph=graph.ordered(order),
        mesh=mesh,
        leaves=leaves,
        order=order,
        shardings=[shardings[place] for place in order],
        donated=tuple(sorted(given.values())),
    )


def in_order(given: Mapping[int, int], count: int) -> list[int]:
    """All outputs: first those that take memory of inputs, in the order of the inputs.

    JAX gives the n-th of the donated inputs of one form to the n-th output of that form.

    Args:
        given: output -> the input whose memory it takes.
        count: number of outputs.
    """
    return [*sorted(given, key=given.__getitem__), *(n for n in range(count) if n not in given)]


def _given_away(
    graph: Graph,
    leaves: Sequence[Value],
    roots: Iterable[Value],
    shardings: Sequence[Any],
    ended: Mapping[int, int],
) -> dict[int, int]:
    """Maps outputs to inputs whose memory they take: of the same form, and no longer held.

    An output takes the memory of the value that it replaces, if that is possible: a new weight can
    be written over the old one, which nothing reads any more by then. If it were written over
    another weight, whose update is still to read it, XLA would have to copy that one first.
    """
    # A replica's value of some shape is an array of all replicas' values, which is larger.
    free: dict[Any, list[int]] = {}
    for place, (slot, leaf) in enumerate(zip(graph.inputs, leaves, strict=True)):
        if leaf.holders == ended.get(id(leaf), 0) and not leaf.uploaded:
            form = (slot.shape, slot.dtype, slot.space, leaf.sharding)
            free.setdefault(form, []).append(place)
    forms = [
        (slot.shape, slot.dtype, slot.space, sharding)
        for slot, sharding in zip(graph.outputs, shardings, strict=True)
    ]
    of_serial = {leaf.serial: place for place, leaf in enumerate(leaves)}
    given: dict[int, int] = {}
    for output, (form, root) in enumerate(zip(forms, roots, strict=True)):
        former = of_serial.get(root.replaces)
        if former is not None and former in free.get(form, ()):
            free[form].remove(former)
            given[output] = former
    for output, form in enumerate(forms):
        if output not in given and free.get(form):
            given[output] = free[form].pop(0)
    return given
