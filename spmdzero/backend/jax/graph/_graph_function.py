"""The function of a graph, which JAX traces.

Nodes of replica space run inside `shard_map`. A graph may enter and leave the region several times:
forward, a loss of the user's, backward. So each node has a phase that is never below those of its
inputs, even in global space and odd in replica space. Each phase of replica space becomes one
`shard_map`. Its values that later phases need cross as arrays with a leading dim of all replicas.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdzero.backend.forms._tree import found, mapped
from spmdzero.backend.jax._memory import ON_DEVICE, ON_HOST, rests_on_host
from spmdzero.backend.jax._versions import is_for_tpu, moved
from spmdzero.backend.jax.axes._merged_dims import MergedDims
from spmdzero.backend.jax.axes._rows import Embedded, cut_later
from spmdzero.backend.jax.axes._slice import batch_axes, sharing_axes
from spmdzero.backend.jax.axes._turned_halves import with_turned_halves
from spmdzero.backend.jax.graph._by_mesh import mesh_of
from spmdzero.backend.jax.graph._graph import Graph, Slot, Step
from spmdzero.backend.jax.graph._lowered import lowered
from spmdzero.backend.jax.graph._numbers import as_taken
from spmdzero.backend.jax.graph._operations import FETCH, KEEP_ON_HOST
from spmdzero.backend.jax.hosts import _own
from spmdzero.backend.jax.lazy._values import Space


def function_of(graph: Graph, mesh: Mesh, shardings: Sequence[Any] = ()) -> Any:
    """The function of arrays that computes the graph; JAX traces it under `wide_numbers`.

    Args:
        graph: the operations.
        mesh: of replica space, unless an operation of the graph has a mesh.
        shardings: of the inputs; none if all are in the devices' memory.
    """
    graph = Graph(graph.inputs, graph.outputs, tuple(with_turned_halves(graph.steps)))
    resting = {
        slot.number: sharding
        for slot, sharding in zip(graph.inputs, shardings, strict=False)
        if rests_on_host(sharding)
    }
    resting |= {
        step.made[0].number: step.op.sharding for step in graph.steps if _is_kept_on_host(step)
    }
    computed_with = {
        slot.number for step in graph.steps if not _fetches(step) for slot in _slots(step)
    }
    phases = _phases(graph)
    last = max(phases.values(), default=0)
    by_phase: dict[int, list[Step]] = {}
    for step in graph.steps:
        by_phase.setdefault(phases[id(step)], []).append(step)
    needed = _needed_later(graph, phases)
    hosts = _own.hosts_of(mesh)

    def run(*arrays: Any) -> list[Any]:
        # It holds global arrays, and those of replicas and hosts with their leading dim.
        whole = {
            slot.number: _own.stacked(a, slot.shape, hosts) if slot.space is Space.HOST else a
            for slot, a in zip(graph.inputs, arrays, strict=True)
        }
        at_rest = dict[int, Any]()
        outputs = {slot.number for slot in graph.outputs}
        # For a TPU also without other axes: see `MergedDims`.
        tiled = is_for_tpu()
        split = MergedDims(outputs, rows=tiled or "sequence" in mesh.axis_names)

        def settle(numbers: Iterable[int]) -> None:
            """Notes what is in the host's memory; operations compute in the devices'."""
            for n in resting.keys() & numbers:
                at_rest[n] = whole[n]
                if n in computed_with:
                    whole[n] = jax.device_put(whole[n], resting[n].with_memory_kind(ON_DEVICE))

        settle([slot.number for slot in graph.inputs])
        for phase in range(last + 1):
            steps = by_phase.get(phase, [])
            if phase % 2 == 0:
                for step in steps:
                    if step.space is Space.HOST:
                        _run_for_hosts(step, whole)
                    elif _fetches(step):
                        known = {**whole, **at_rest}
                        _run(step, known)
                        whole |= {slot.number: known[slot.number] for slot in step.made}
                    else:
                        _run(step, whole, mesh)
                        settle([slot.number for slot in step.made])
            elif steps:
                phase_mesh = mesh_of(steps, mesh)
                kept = split if tiled or sharing_axes(phase_mesh) else None
                _run_region(steps, whole, needed.get(phase, set()), phase_mesh, kept)
        whole |= at_rest
        # What a region keeps on the host leaves the program on the devices, where others compute.
        whole |= {number: moved(whole[number], host=False) for number in _kept(graph)}
        results = [
            _own.joined(whole[slot.number]) if slot.space is Space.HOST else whole[slot.number]
            for slot in graph.outputs
        ]
        given = {id(array) for array in arrays}
        # JAX would return the very buffer of an input, which may be donated later.
        return [jnp.copy(r) if id(r) in given else r for r in results]

    return run


def _is_kept_on_host(step: Step) -> bool:
    return getattr(step.op, "memory", None) == ON_HOST


def _fetches(step: Step) -> bool:
    return step.op.key[0] == FETCH


def _phases(graph: Graph) -> dict[int, int]:
    """The phase of each step, by the step's id."""
    of_slot = {s.number: int(s.space is Space.REPLICA) for s in graph.inputs}
    phases = {}
    for step in graph.steps:
        latest = max((of_slot[s.number] for s in _slots(step)), default=0)
        inside = _inside(step)
        phase = latest if latest % 2 == inside else latest + 1
        phases[id(step)] = phase
        # A value that leaves the region is global from the next phase on.
        after = phase + 1 if _leaves(step) else phase
        of_slot |= {slot.number: after for slot in step.made}
    return phases


def _kept(graph: Graph) -> set[int]:
    """The numbers of the outputs that are in the host's memory."""
    kept = {
        slot.number for step in graph.steps if step.op.key[0] == KEEP_ON_HOST for slot in step.made
    }
    return kept & {slot.number for slot in graph.outputs}


def _leaves(step: Step) -> bool:
    return step.op.key[0] == "leave"


def _inside(step: Step) -> bool:
    return step.space is Space.REPLICA or _leaves(step)


def _slots(step: Step) -> list[Slot]:
    return found((step.args, step.kwargs), Slot)


def _needed_later(graph: Graph, phases: dict[int, int]) -> dict[int, set[int]]:
    """Maps each phase to the numbers of its slots that other phases read, or that are outputs."""
    made_in = {s.number: phases[id(step)] for step in graph.steps for s in step.made}
    needed: dict[int, set[int]] = {}
    for step in graph.steps:
        for slot in _slots(step):
            phase = made_in.get(slot.number)
            if phase is not None and phase != phases[id(step)]:
                needed.setdefault(phase, set()).add(slot.number)
    for slot in graph.outputs:
        if slot.number in made_in:
            needed.setdefault(made_in[slot.number], set()).add(slot.number)
    return needed


def _run(step: Step, known: dict[int, Any], mesh: Mesh | None = None) -> None:
    with _named(step):
        results = _results(step, known)
    known |= {slot.number: result for slot, result in zip(step.made, results, strict=False)}
    if mesh is not None:
        cut_later(step, _slots(step), known, mesh)


def _results(step: Step, known: dict[int, Any]) -> list[Any]:
    args = mapped(step.args, Slot, lambda slot: as_taken(slot, known[slot.number]))
    kwargs = mapped(step.kwargs, Slot, lambda slot: as_taken(slot, known[slot.number]))
    forms = [(slot.shape, slot.dtype) for slot in step.made]
    return lowered(step.op, args, kwargs, forms)


def _run_for_hosts(step: Step, whole: dict[int, Any]) -> None:
    """Runs an operation whose results differ from host to host."""
    slots = _slots(step)
    given = [whole[slot.number] for slot in slots]

    def of_one(*arrays: Any) -> list[Any]:
        known = {slot.number: array for slot, array in zip(slots, arrays, strict=True)}
        return _results(step, known)

    with _named(step):
        if step.op.makes is None:
            own = [slot.space is Space.HOST for slot in slots]
            results = _own.for_each(of_one, given, own=own)
        else:
            # It makes host values from global ones, and handles the leading dim itself.
            results = [step.op(*given)]
    whole |= {slot.number: result for slot, result in zip(step.made, results, strict=False)}


@contextlib.contextmanager
def _named(step: Step) -> Iterator[None]:
    with contextlib.ExitStack() as names:
        for name in step.scope:
            names.enter_context(jax.named_scope(name))
        yield


def run_steps(graph: Graph, arrays: Sequence[Any], split: MergedDims | None = None) -> list[Any]:
    """The results of a graph that crosses no border, for traced inputs.

    Args:
        graph: the operations.
        arrays: the inputs, in torch's form.
        split: as of `_run_region`.
    """
    known = {slot.number: array for slot, array in zip(graph.inputs, arrays, strict=True)}
    steps = with_turned_halves(graph.steps)
    if split:
        split.begin(steps, {slot.number for slot in graph.outputs})
    for step in steps:
        if not (split and split.computes(step, _slots(step), known)):
            _run(step, known)
    return [known[slot.number] for slot in graph.outputs]


def _run_region(
    steps: list[Step],
    whole: dict[int, Any],
    needed: set[int],
    mesh: Mesh,
    split: MergedDims | None,
) -> None:
    """Runs a phase of replica space, and adds the values that others need to `whole`.

    Args:
        steps: the operations of the phase.
        whole: number of a slot -> array.
        needed: numbers of the slots that other phases read, or that are outputs.
        mesh: the devices.
        split: computes what torch merges dims of, where devices share a replica's work.
    """
    stacked = PartitionSpec(batch_axes(mesh))
    own = {slot.number for step in steps for slot in step.made}
    entering: dict[tuple[int, Any], Any] = {}
    outer: dict[int, Slot] = {}
    for step in steps:
        if step.op.key[0] == "enter":
            (slot,) = _slots(step)
            entering[slot.number, step.op.spec] = PartitionSpec(*step.op.spec)
            continue
        for slot in _slots(step):
            if slot.number not in own:
                outer[slot.number] = slot
    enters, others = list(entering), list(outer)
    in_specs = [*entering.values()]
    by_device = {n: slot.space in (Space.REPLICA, Space.HOST) for n, slot in outer.items()}
    in_specs += [stacked if by_device[n] else PartitionSpec() for n in others]
    leaving = [step for step in steps if _leaves(step)]
    gone = {step.made[0].number for step in leaving}
    kept = sorted(needed - gone)
    left = [step for step in leaving if step.made[0].number in needed]

    def inside(*arrays: Any) -> list[Any]:
        at_border = dict(zip(enters, arrays, strict=False))
        known: dict[int, Any] = {}
        embedded = Embedded(mesh)
        for number, array in zip(others, arrays[len(enters) :], strict=True):
            entered = array[0] if by_device[number] else array
            known[number] = split.enter(outer[number], entered) if split else entered
        if split:
            split.begin(steps, needed)
        for step in steps:
            if step.op.key[0] == "enter":
                (slot,) = _slots(step)
                array = at_border[slot.number, step.op.spec]
                known[step.made[0].number] = embedded.enter(step, array)
            elif _leaves(step):
                (slot,) = _slots(step)
                known[step.made[0].number] = known[slot.number]
            elif not (split and split.computes(step, _slots(step), known)):
                _run(step, known, mesh)
                embedded.make(step, known)
        results = [known[step.made[0].number] for step in left]
        if split:
            known |= {number: split.leave(number, known[number]) for number in kept}
            split.end()
        return [*results, *(known[number][None] for number in kept)]

    out_specs = [PartitionSpec(*step.op.spec) for step in left] + [stacked for _ in kept]
    on_each: Any = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        # The compiler divides what happens inside over the axis tensor, by the weights' shardings.
        axis_names=set(batch_axes(mesh)),
        check_vma=False,
    )
    given = [whole[number] for number, _ in enters] + [
        _own.on_each_device(whole[n], mesh) if outer[n].space is Space.HOST else whole[n]
        for n in others
    ]
    results = on_each(*given)
    numbers = [step.made[0].number for step in left] + kept
    whole |= dict(zip(numbers, results, strict=True))


def marked_spec(graph: Graph, mesh: Mesh) -> list[Any]:
    """The sharding of each output that is annotated, None for the compiler's choice."""
    shardings: list[Any] = []
    for slot in graph.outputs:
        if slot.space is Space.REPLICA:
            shardings.append(NamedSharding(mesh, PartitionSpec(batch_axes(mesh))))
        elif slot.space is Space.HOST:
            shardings.append(_own.sharding(slot.shape, mesh))
        else:
            op = graph.marks.get(slot.number)
            shardings.append(None if op is None else op.sharding)
    return shardings
