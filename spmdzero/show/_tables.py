"""The tables of an explanation, before they are text or HTML."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmdzero.explain._moves import Moves
from spmdzero.plan import Role

if TYPE_CHECKING:
    from spmdzero.explain._explanation import Explanation
    from spmdzero.inspect import Collective


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One table; `numbers` are the columns that line up on the right."""

    title: str
    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: frozenset[int]
    notes: tuple[str, ...] = ()


def fit_grid(explanation: "Explanation") -> Grid:
    """Bytes per device of each stage by each account."""
    fits = explanation.fits
    rows: list[tuple[str, ...]] = [
        (f"plan: {role}", *(f"{fit.plan[role]:,}" for fit in fits)) for role in Role
    ]
    rows.append(("plan: lives between steps", *(f"{fit.states:,}" for fit in fits)))
    rows.append(("ZeRO paper's formula", *(_count(fit.paper) for fit in fits)))
    rows.append(("DeepSpeed's estimate", *(_count(fit.deepspeed) for fit in fits)))
    targets = {memory.target: memory.hbm_bytes for fit in fits for memory in fit.compiled}
    notes = [explanation.paper_note]
    if any(memory.memory.arguments is None for fit in fits for memory in fit.compiled):
        notes.append("A peak without inputs is what the compiler said when it gave up.")
    for target, hbm in targets.items():
        found = [{m.target: m.memory for m in fit.compiled}.get(target) for fit in fits]
        rows.append(
            (f"{target}: inputs", *(_count(None if m is None else m.arguments) for m in found))
        )
        rows.append((f"{target}: peak", *(_count(None if m is None else m.peak) for m in found)))
        if hbm is not None:
            verdicts = ("-" if m is None else "yes" if m.peak <= hbm else "NO" for m in found)
            rows.append((f"{target}: fits in {hbm / 2**30:.0f} GiB", *verdicts))
    if any(target.startswith("cpu") for target in targets):
        notes.append("The CPU's peak is estimated from the schedule, from above.")
    return Grid(
        title="1. Does it fit? Bytes per device",
        headers=("account", *(f"stage {fit.stage}" for fit in fits)),
        rows=rows,
        numbers=frozenset({1, 2, 3}),
        notes=tuple(notes),
    )


def moves_grid(moves: Moves) -> Grid:
    """One line for each kind of collective of each program."""
    rows: list[tuple[str, ...]] = []
    for program in moves.programs:
        groups: dict[tuple[str, str, str, str, str], list[Collective]] = defaultdict(list)
        for c in program.ledger.collectives:
            kind = f"{c.kind} + slice" if c.scattered and c.kind == "all-reduce" else c.kind
            unknown = "not said" if c in moves.unnamed else "activation"
            role = c.role or ("scalar" if c.is_scalar else unknown)
            loop, overlapped = ("yes" if flag else "no" for flag in (c.in_loop, c.asynchronous))
            groups[role, kind, c.dtype, loop, overlapped].append(c)
        for key, members in sorted(groups.items()):
            role, kind, dtype, loop, overlapped = key
            counts = (len(members), sum(c.bytes for c in members), _wire(members))
            label = f"{program.kind} x{program.runs}"
            rows.append((label, role, kind, dtype, *map("{:,}".format, counts), loop, overlapped))
    notes = [
        f"a device sends {moves.wire_bytes:,} bytes a step: {moves.wire_elements:,} elements, "
        f"{moves.over_floor:.3f} x the floor of {moves.floor_elements:,}"
    ]
    if moves.unnamed:
        notes.append(
            "not said: libtpu split collectives over all slices into ones within a slice and "
            "transfers between slices; the transfers are not counted"
        )
    notes += [
        f"activation: {c.kind} {c.dtype}{list(c.shape)} {c.op_name} {c.source}".rstrip()
        for c in moves.activations
    ]
    return Grid(
        title=f"2. What moves on {moves.target}?",
        headers=(
            "program", "serves", "collective", "dtype", "tensors", "bytes", "sent", "in loop",
            "async",
        ),
        rows=rows,
        numbers=frozenset({4, 5, 6}),
        notes=tuple(notes),
    )  # fmt: skip


def refused_grid(moves: Moves) -> Grid:
    """One line for each reason for which reduce-scatters were refused."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for refused in moves.refused:
        groups[refused.reason, refused.fix].append(refused.tensor)
        sizes[refused.reason, refused.fix] += refused.bytes
    rows: list[tuple[str, ...]] = [
        (str(len(tensors)), f"{sizes[key]:,}", tensors[0], *key) for key, tensors in groups.items()
    ]
    return Grid(
        title=f"   Reduce-scatters that {moves.target} refused",
        headers=("tensors", "bytes", "the first", "why", "what restores it"),
        rows=rows,
        numbers=frozenset({0, 1}),
    )


def flops_grid(explanation: "Explanation") -> Grid:
    """One line for each chip."""
    rows: list[tuple[str, ...]] = [
        (
            line.target,
            "compiled" if line.compiled else "floor",
            _time(line.compute),
            "-" if line.memory is None else _time(line.memory),
            _time(line.network),
            line.bound,
            f"{line.intensity:,.0f}",
            f"{line.hiding_tokens:,}",
        )
        for line in explanation.rooflines
    ]
    return Grid(
        title="4. What does a step wait for? Least time of each part",
        headers=(
            "chip", "from", "compute", "memory", "network", "bound by", "flops/byte sent",
            "network hides from",
        ),
        rows=rows,
        numbers=frozenset({2, 3, 4, 6, 7}),
        notes=(
            "compiled: the TPU compiler's own counts; floor: the CPU program's matrix products and "
            "the least that ZeRO moves. The last column is tokens a device and step.",
            "Over ICI only: between slices the data-center network is slower.",
        ),
    )  # fmt: skip


def _wire(collectives: "list[Collective]") -> int:
    return sum(c.wire_bytes for c in collectives)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
