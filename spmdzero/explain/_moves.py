"""Compares a step's collectives with the least traffic that ZeRO needs."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from spmdzero.explain._chips import Topology
from spmdzero.explain._refused_scatters import RefusedScatter, refused_scatters
from spmdzero.inspect import Collective, CollectiveLedger
from spmdzero.plan import Role, ShardingPlan, TensorPlan

# Roles of the ledger: what devices of one replica hand each other, by mesh axis.
_SHARED = ("tensor", "sequence")


@dataclass(frozen=True, kw_only=True)
class ProgramLedger:
    """The collectives of one of a step's programs.

    Attributes:
        kind: ``"micro"`` or ``"boundary"``.
        runs: number of its runs in one step.
        ledger: its collectives.
    """

    kind: str
    runs: int
    ledger: CollectiveLedger


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The traffic of one step on one target.

    Attributes:
        target: ``cpu:8``, ``v5e:2x4``, ...
        programs: each program's ledger.
        wire_bytes: bytes that one device sends in a step.
        wire_elements: elements that one device sends in a step, so that two dtypes compare; without
            activations that devices of a replica hand each other.
        tensor_bytes, sequence_bytes: bytes of `wire_bytes` that it sends to devices that share its
            replica's work, over the mesh axes of these names.
        floor_elements: the least number: one reduction of each gradient and one gather of each
            updated parameter, Ψ(N-1)/N elements each; at stage 2 with K micro-batches K reductions.
            N is the number of replicas times that of the devices which share a row.
        activations: collectives that move an activation, as the audit finds them.
        unnamed: collectives within slices that libtpu made, without names, from collectives that
            span slices; their traffic from slice to slice is not in the ledger.
        refused: gradients that the plan shards and the compiler reduced whole.
    """

    target: str
    programs: tuple[ProgramLedger, ...]
    wire_bytes: int
    wire_elements: int
    tensor_bytes: int
    sequence_bytes: int
    floor_elements: int
    activations: tuple[Collective, ...]
    unnamed: tuple[Collective, ...]
    refused: tuple[RefusedScatter, ...]

    @property
    def over_floor(self) -> float:
        """Elements sent, as a multiple of the floor."""
        return self.wire_elements / self.floor_elements if self.floor_elements else 1.0

    @property
    def cost_of_refused(self) -> float:
        """The part of `wire_bytes` that goes to `refused` beyond what reduce-scatters send."""
        whole = {refused.tensor for refused in self.refused}
        # An all-reduce is a reduce-scatter and an all-gather of the same size.
        more = sum(
            program.runs * collective.turns * collective.wire_bytes / 2
            for program in self.programs
            for collective in program.ledger.of_role("gradient")
            if collective.tensor in whole
        )
        return more / self.wire_bytes if self.wire_bytes else 0.0


def measure_moves(
    plan: ShardingPlan,
    programs: Sequence[ProgramLedger],
    *,
    stray: Sequence[Collective],
    target: str,
    topology: Topology | None,
) -> Moves:
    """The traffic of the compiled programs of one step under `plan`.

    Args:
        plan: the sharding plan.
        programs: the ledgers of the step's programs.
        stray: collectives of all programs that serve no tensor of ZeRO.
        target: the target's name.
        topology: the chips of a TPU target; None for the CPU.
    """
    moved = [(c, p.runs * c.turns) for p in programs for c in p.ledger.collectives]
    over_slices = topology is not None and topology.slices > 1
    unnamed = tuple(c for c in stray if over_slices and not c.op_name)
    return Moves(
        target=target,
        programs=tuple(programs),
        wire_bytes=sum(runs * c.wire_bytes for c, runs in moved),
        wire_elements=sum(runs * _wire_elements(c) for c, runs in moved if not _is_own(c)),
        tensor_bytes=sum(p.runs * shared_bytes(p.ledger, ["tensor"]) for p in programs),
        sequence_bytes=sum(p.runs * shared_bytes(p.ledger, ["sequence"]) for p in programs),
        floor_elements=floor_elements(plan),
        activations=tuple(c for c in stray if c not in unnamed),
        unnamed=unnamed,
        refused=refused_scatters(plan, [c for c, _ in moved], topology=topology),
    )


def shared_bytes(ledger: CollectiveLedger, axes: Collection[str] = _SHARED) -> int:
    """Bytes that a device sends in a run to devices that share its replica's work over `axes`."""
    return sum(c.turns * c.wire_bytes for c in ledger.collectives if c.role in axes)


def floor_elements(plan: ShardingPlan) -> int:
    """Number of elements that each device must send in one step of `plan`, rounded down.

    It is 2Ψ(N-1)/N for a ring's reduce-scatter and all-gather, or its all-reduce, which is both;
    with two mesh axes, reducing over one and then over the other gives the same. Stage 2 reduces
    each sharded gradient once per micro-batch. Stage 3 gathers a parameter that rests as a shard
    twice per micro-batch, for forward and for backward: 3Ψ(N-1)/N, and 2Ψ(N-1)/N of frozen ones.
    Groups that each have a copy of the shards gather among themselves, and keep them equal once.
    Devices that share rows add up gradients with all others, have states of their own, and hold the
    same part of a parameter, which they gather once.
    """
    return int(sum(_times_sent(plan, t) * t.elements_of_part(plan.mesh) for t in plan))


def _times_sent(plan: ShardingPlan, tensor: TensorPlan) -> Fraction:
    """Counts what each device sends of a parameter in one step, as a multiple of the parameter."""
    n, groups = plan.mesh.replicas, plan.mesh.data
    devices = n * plan.mesh.sequence
    once = Fraction(devices - 1, devices)
    gradient = tensor.placement(Role.GRADIENT)
    reductions = plan.accumulation_steps if plan.stage >= 2 else 1
    if tensor.require(Role.PARAMETER).over_fsdp:
        gathers = Fraction(2 * plan.accumulation_steps * (n - groups), n)
        sharers = plan.mesh.sequence
        updated = Fraction(groups - 1, n) + Fraction(sharers - 1, sharers * n)
        return gathers if gradient is None else reductions * once + gathers + updated
    if gradient is None:
        return Fraction(0)
    # An all-reduce of a whole gradient is a reduce-scatter and a gather each time.
    return (2 * reductions if gradient.kind == "replicate" else reductions + 1) * once


def _is_own(collective: Collective) -> bool:
    """Whether it moves activations among devices that share a replica's work."""
    if collective.role == "sequence":
        return not collective.tensor and collective.kind not in ("all-reduce", "reduce-scatter")
    return collective.role in _SHARED


def _wire_elements(collective: Collective) -> int:
    elements = math.prod(collective.shape)
    return collective.wire_bytes * elements // collective.bytes if collective.bytes else 0
