"""Pages of explanations: questions, each answered by a table."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from spmdzero._display import page_of
from spmdzero.explain import Explanation, Moves, StageFit
from spmdzero.inspect import Collective
from spmdzero.plan import Role, sized
from spmdzero.show._audit import findings
from spmdzero.show._ledger import grouped, sums, yes_no
from spmdzero.show._page import About, Folded, Heading, Lines, Page, Part, Source, Table
from spmdzero.show._time import time_parts
from spmdzero.show._verdict import cards

_NOT_COMPILED = "Not known: the compiler made no program of a step that doesn't fit."
_ONLY_IN_A_RUN = (
    "Nothing was trained: replicated states, parameter drift, missing donation, recompilation, "
    "host reads and CPU fallbacks show in a run only."
)


@page_of.register
def explanation_page(explanation: Explanation) -> Page:
    """A page with the verdict, then the answers below their questions."""
    return together([explanation])


def together(explanations: Sequence[Explanation], *, told: Sequence[tuple[str, str]] = ()) -> Page:
    """A page with the verdicts of all explanations, then the answers of each explanation.

    Args:
        explanations: the explanations.
        told: facts that only the command knows, as name and text: the HTML begins with them.
    """
    first = explanations[0]
    targets = ", ".join(v.target for e in explanations for v in e.verdicts)
    about = About("spmdzero explain", [*told, ("model", first.model), ("targets", targets)])
    verdicts = [card for e in explanations for card in cards(e)]
    config = Folded("The config", (Source(json.dumps(first.config, indent=2)),))
    answers = [part for explanation in explanations for part in explanation_parts(explanation)]
    return Page((about, *verdicts, *answers, config), title=f"spmdzero explain: {targets}")


def explanation_parts(explanation: Explanation) -> Iterator[Part]:
    """Yields the answers of an explanation, below their questions."""
    micro = explanation.accumulation
    counted = f"{explanation.counted}{'s' * (explanation.tokens != 1)}"
    heading = (
        f"ZeRO stage {explanation.stage} on the mesh {explanation.mesh}, "
        f"{micro} micro-batch{'es' if micro > 1 else ''} a step, "
        f"{explanation.tokens:,} {counted} a device and step"
    )
    flags = f"flags of the TPU compiler: {', '.join(explanation.xla_flags)}"
    yield Lines((heading, *explanation.notes, flags, *_attention(explanation)))
    yield Heading("1. Does it fit?")
    yield _fit_table(explanation)
    yield Heading("2. What moves?")
    yield from _moved(explanation)
    audit = explanation.audit
    yield Heading("3. What is wrong?")
    yield findings(audit, below=_ONLY_IN_A_RUN if audit.programs and not audit.steps else "")
    yield Heading("4. What does a step wait for?")
    yield _roofline_table(explanation) if explanation.rooflines else Lines((_NOT_COMPILED,))
    if explanation.times:
        yield Heading("5. How long does a step take?")
    for time in explanation.times:
        yield from time_parts(time)


def _moved(explanation: Explanation) -> Iterator[Part]:
    """Yields the TPUs' tables, then this process's own, which HTML folds if there are TPUs."""
    on_tpu = [moves for moves in explanation.moves if not moves.target.startswith("cpu")]
    for moves in sorted(explanation.moves, key=lambda moves: moves not in on_tpu):
        parts: tuple[Part, ...] = (_moves_table(moves),)
        if moves.refused:
            parts = (*parts, _refused_table(moves))
        if on_tpu and moves not in on_tpu:
            parts = (Folded(f"What moves on {moves.target}, where the step was traced", parts),)
        yield from parts
    if not explanation.moves:
        yield Lines((_NOT_COMPILED,))


def _attention(explanation: Explanation) -> Iterator[str]:
    """Yields lines about attention in the programs for TPUs, if there are any."""
    if explanation.tpu_note:
        yield explanation.tpu_note
    for use in explanation.attention:
        calls = f"{use.calls} call{'s' if use.calls > 1 else ''}"
        if use.plain_because is None:
            yield f"attention on a TPU: {calls} by a kernel, first at {use.first}"
        else:
            yield (
                f"attention on a TPU: {calls} as plain products, first at {use.first}, because "
                f"{use.plain_because}"
            )


def _plan_on_host(fits: Sequence[StageFit]) -> Iterator[tuple[str, ...]]:
    if any(fit.plan.host_total for fit in fits):
        yield ("plan: in host memory", *(sized(fit.plan.host_total) for fit in fits))


def _fit_table(explanation: Explanation) -> Table:
    """A table of the bytes per device of each stage, by each account."""
    fits = explanation.fits
    rows: list[tuple[str, ...]] = [
        *((f"plan: {role}", *(sized(fit.plan[role]) for fit in fits)) for role in Role),
        ("plan: lives between steps", *(sized(fit.states) for fit in fits)),
        *_plan_on_host(fits),
        ("ZeRO paper's formula", *(_count(fit.paper) for fit in fits)),
        ("DeepSpeed's estimate", *(_count(fit.deepspeed) for fit in fits)),
    ]
    compiled = [memory for fit in fits for memory in fit.compiled]
    for target, hbm in {memory.target: memory.hbm_bytes for memory in compiled}.items():
        found = [{m.target: m for m in fit.compiled}.get(target) for fit in fits]
        inputs = (_count(m.memory.arguments if m else None) for m in found)
        rows.append((f"{target}: inputs", *inputs))
        rows.append((f"{target}: peak", *(_count(m.memory.peak if m else None) for m in found)))
        if any(m is not None and m.memory.host_peak for m in found):
            on_host = (_count(m.memory.host_peak if m else None) for m in found)
            rows.append((f"{target}: host memory", *on_host))
        if hbm is not None:
            verdicts = ("-" if m is None else "yes" if m.fits else "NO" for m in found)
            rows.append((f"{target}: fits in {hbm / 2**30:.0f} GiB", *verdicts))
    notes = [explanation.paper_note]
    if any(memory.memory.arguments is None for memory in compiled):
        notes.append("A peak without inputs is what the compiler said when it gave up.")
    if any(memory.target.startswith("cpu") for memory in compiled):
        notes.append("The CPU's peak is estimated from the schedule, from above.")
    return Table(
        title="Memory per device",
        headers=("account", *(f"stage {fit.stage}" for fit in fits)),
        rows=rows,
        numbers=tuple(range(1, len(fits) + 1)),
        notes=notes,
    )


def _moves_table(moves: Moves) -> Table:
    """A table with one row for each kind of collective of each program."""

    def key(c: Collective) -> tuple[str, ...]:
        unknown = "not said" if c in moves.unnamed else "activation"
        role = c.role or ("scalar" if c.is_scalar else unknown)
        return role, c.kind_and_slice, c.dtype, yes_no(c.in_loop), yes_no(c.asynchronous)

    rows = [
        (f"{program.kind} x{program.runs}", *kind, *sums(moved), loop, overlapped)
        for program in moves.programs
        for (*kind, loop, overlapped), moved in grouped(program.ledger.collectives, key)
    ]
    notes = [
        f"a device sends {moves.wire_bytes:,} bytes a step: {moves.wire_elements:,} elements, "
        f"{moves.over_floor:.3f} x the floor of {moves.floor_elements:,}"
    ]
    notes += [
        f"{sent:,} of these bytes go to devices that share its replica's work, over the axis "
        f"{axis}, and don't count towards the floor"
        for axis, sent in (("tensor", moves.tensor_bytes), ("sequence", moves.sequence_bytes))
        if sent
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
    words = "program, serves, collective, dtype, tensors, bytes, sent, in loop, async"
    return Table(
        title=f"on {moves.target}",
        headers=words.split(", "),
        rows=rows,
        numbers=(4, 5, 6),
        notes=notes,
    )


def _refused_table(moves: Moves) -> Table:
    """A table with one row for each reason for refused reduce-scatters."""
    groups: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for refused in moves.refused:
        groups[refused.reason, refused.fix].append((refused.tensor, refused.bytes))
    return Table(
        title=f"Reduce-scatters that the compiler for {moves.target} refused",
        headers=("tensors", "bytes", "the first", "why", "fix"),
        rows=[
            (str(len(found)), f"{sum(size for _, size in found):,}", found[0][0], *reason)
            for reason, found in groups.items()
        ],
        numbers=(0, 1),
    )


def _roofline_table(explanation: Explanation) -> Table:
    """A table with one row for each chip."""
    rows = [
        (
            line.target,
            "compiled" if line.compiled else "floor",
            *map(_time, (line.compute, line.memory, line.network)),
            *(line.bound, f"{line.intensity:,.0f}", _tokens(line.hiding_tokens)),
        )
        for line in explanation.rooflines
    ]
    counted = f"{explanation.counted}s"
    words = f"chip, from, compute, memory, network, bound by, flops/byte sent, {counted} to overlap"
    return Table(
        title="Least time of each part",
        headers=words.split(", "),
        rows=rows,
        numbers=(2, 3, 4, 6, 7),
        notes=(
            "compiled: the TPU compiler's own counts; floor: the CPU program's matrix products and "
            f"the least that ZeRO moves. The last column is the {counted} a device and step from "
            "which compute takes as long as communication, and can overlap all of it.",
            "Over ICI only: between slices the data-center network is slower.",
        ),
    )


def _count(value: int | None) -> str:
    return "-" if value is None else sized(value)


def _tokens(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
