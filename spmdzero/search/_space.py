"""All ways to train that a slice and a JSON leave open."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain import Topology
from spmdzero.search._asked import Asked
from spmdzero.search._knobs import (
    ACCUMULATION,
    CONTEXT_ON_HOST,
    POLICIES,
    ROWS,
    STAGE,
    Blocks,
    Candidate,
    Stays,
)
from spmdzero.search._model import Forward

_HOST = ((), ("optimizer",), ("optimizer", "param"), ("param",))
# Blocks of which a part computes nothing again are so many parts.
_PARTS = 4


def space(asked: Asked, topology: Topology, *, forward: Forward) -> list[Candidate]:
    """Every candidate that has the JSON's own values.

    Args:
        asked: what the user wrote.
        topology: the slice.
        forward: of the model.

    Raises:
        SpmdZeroUsageError: no mesh divides the batch.
    """
    asked = asked.on(topology.devices)
    shapes = [shape for shape in _shapes(topology) if asked.rows % _replicas(shape, topology) == 0]
    if not shapes:
        least = min(_replicas(shape, topology) for shape in _shapes(topology))
        raise SpmdZeroUsageError(
            f"a step of {asked.rows} rows can't be divided over the {topology.devices} devices of "
            f"{topology.name}: each replica has whole rows, and there are {least} at least. Take a "
            f"multiple, such as --global-batch {math.ceil(asked.rows / least) * least}"
        )
    # A set of flags takes a program several times as long to compile: the funnel tries the chip's
    # own set on the best, see `Funnel`.
    flags = "auto" if asked.kept.get("spmd.xla_flags") == "auto" else "none"
    found = []
    for shape in shapes:
        for sized in _batches(shape, asked.rows // _replicas(shape, topology)):
            for candidate in _rest(sized, forward, flags=flags):
                if asked.allows(candidate.keys(blocks=forward.blocks)):
                    found.append(candidate)
    if STAGE not in asked.kept:
        # Without accumulation stage 2 is the same program as stage 1, and has what 1 has.
        found = [c for c in found if (c.stage, c.accumulation) != (1, 1)]
    if not found:
        raise SpmdZeroUsageError(_nothing_left(asked, topology, shapes))
    return found


def own_candidate(asked: Asked, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that the JSON itself is: what it doesn't name has its default value.

    Where it names no micro-batch, it is one whose rows are all of the step's, or the most that
    there are.
    """
    stage = asked.kept.get(STAGE, 0)
    return min(candidates, key=lambda c: (c.stage != stage, c.plainness, c.accumulation))


def _shapes(topology: Topology) -> Iterator[Candidate]:
    """A candidate for each stage and mesh, with no batch yet."""
    devices = topology.devices
    sizes = [size for size in range(2, devices) if devices % size == 0]
    for stage in range(4):
        plain = Candidate(stage=stage, rows=1, accumulation=1)
        yield plain
        for size in sizes:
            yield dataclasses.replace(plain, data=size)
            if stage == 3:
                yield dataclasses.replace(plain, group=size)
        for axis in ("sequence", "tensor"):
            # A host of four or eight chips holds such an axis whole.
            most = devices // topology.hosts
            for size in (size for size in (*sizes, devices) if 1 < size <= most):
                yield dataclasses.replace(plain, **{axis: size})  # type: ignore[bad-argument-type]


def _replicas(candidate: Candidate, topology: Topology) -> int:
    return topology.devices // (candidate.sequence * candidate.tensor)


def _batches(candidate: Candidate, rows: int) -> Iterator[Candidate]:
    """The candidate with each way to cut the rows of a replica into equal micro-batches."""
    for size in range(1, rows + 1):
        if rows % size == 0:
            yield dataclasses.replace(candidate, rows=size, accumulation=rows // size)


def _rest(candidate: Candidate, forward: Forward, *, flags: str) -> Iterator[Candidate]:
    losses = (False, True) if forward.fuses else (False,)
    kernels = ("auto", "plain") if forward.pairs else ("auto",)
    hosts = _HOST if candidate.stage == 3 else _HOST[:2]
    for how, loss, host, attention in itertools.product(
        list(_recomputed(forward)), losses, hosts, kernels
    ):
        # What no kernel computes is computed again from all pairs, kept or not.
        if isinstance(how.get("recompute"), Stays) and attention == "plain":
            continue
        yield dataclasses.replace(
            candidate, **how, fused_loss=loss, host=host, attention=attention, flags=flags
        )


def _recomputed(forward: Forward) -> Iterator[dict[str, Any]]:
    """Yields the knobs of how blocks are compiled and computed again."""
    blocks = forward.blocks
    if not blocks.count:
        yield {}
        return
    for policy in POLICIES:
        for kept in _kept(policy, blocks):
            yield {"recompute": policy, "kept": kept}
        # The blocks of a loop are equal.
        yield {"recompute": policy, "scan": True}
    for names in forward.keep_sets:
        yield {"recompute": Stays(names=names)}
        yield {"recompute": Stays(names=names), "scan": True}
    if forward.contexts:
        yield {"recompute": CONTEXT_ON_HOST, "scan": True}


def _kept(policy: str, blocks: Blocks) -> Sequence[int]:
    """Numbers of blocks that compute nothing again, for a policy that is for the others."""
    if policy != "everything":
        return (0,)
    return (0, *sorted({blocks.count * part // _PARTS for part in range(1, _PARTS)} - {0}))


def _nothing_left(asked: Asked, topology: Topology, shapes: Sequence[Candidate]) -> str:
    named = ", ".join(f"{key} = {value}" for key, value in asked.kept.items())
    each = sorted({asked.rows // _replicas(shape, topology) for shape in shapes})
    rows, steps = asked.kept.get(ROWS), asked.kept.get(ACCUMULATION)
    if rows is not None or steps is not None:
        return (
            f"no way to train on {topology.name} has what the JSON names ({named}): a step of "
            f"{asked.rows} rows is {', '.join(map(str, each))} on each replica, by the mesh. "
            f'Write "auto" for {ROWS} and {ACCUMULATION}, or another --global-batch'
        )
    return (
        f'no way to train on {topology.name} has what the JSON names ({named}). Write "auto" for '
        "what may be changed, for example --set zero_optimization.stage=auto"
    )
