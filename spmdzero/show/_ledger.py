"""Pages of ledgers of collectives."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from spmdzero._display import page_of
from spmdzero.inspect import Collective, CollectiveLedger, LedgerDetails
from spmdzero.show._page import Page, Table

_Cell = TypeVar("_Cell", str, int)


@page_of.register
def ledger_page(ledger: CollectiveLedger) -> Page:
    """A page with one row for each role and kind."""
    return _page(
        ledger,
        headers=(
            *("role", "collective", "dtype", "tensors", "bytes", "wire bytes"),
            *_over_hosts(ledger, "between hosts"),
            "in loop",
        ),
        rows=[
            (
                *key,
                *sums(of_key),
                *_over_hosts(ledger, f"{sum(c.turns * c.host_bytes for c in of_key):,}"),
                loop,
            )
            for (*key, loop), of_key in grouped(
                ledger.collectives,
                lambda c: (_role(ledger, c), c.kind_and_slice, c.dtype, yes_no(c.in_loop)),
            )
        ],
        numbers=(3, 4, 5, *_over_hosts(ledger, 6)),
    )


@page_of.register
def details_page(details: LedgerDetails) -> Page:
    """A page with one row for each collective and its tensor."""
    ledger = details.ledger
    return _page(
        ledger,
        headers=(
            *("role", "tensor", "collective", "dtype", "shape", "bytes", "wire bytes"),
            *_over_hosts(ledger, "between hosts"),
            *_with_loops(ledger, "turns"),
        ),
        rows=[
            (
                *(_role(ledger, c), c.tensor, c.kind_and_slice, c.dtype, str(list(c.shape))),
                *(f"{c.bytes:,}", f"{c.wire_bytes:,}"),
                *_over_hosts(ledger, f"{c.host_bytes:,}"),
                *_with_loops(ledger, str(c.turns)),
            )
            for c in ledger.collectives
        ],
        numbers=tuple(range(5, 7 + (ledger.hosts > 1) + _has_loops(ledger))),
    )


def grouped(
    collectives: Iterable[Collective], key: Callable[[Collective], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[Collective]]]:
    """Each key, sorted, with its collectives."""
    groups: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for collective in collectives:
        groups[key(collective)].append(collective)
    return sorted(groups.items())


def sums(collectives: Sequence[Collective]) -> tuple[str, str, str]:
    """Number, bytes and wire bytes of the collectives, as cells; a loop's count at each turn."""
    total = sum(c.turns * c.bytes for c in collectives)
    wire = sum(c.turns * c.wire_bytes for c in collectives)
    return str(sum(c.turns for c in collectives)), f"{total:,}", f"{wire:,}"


def yes_no(flag: bool) -> str:
    """The cell of a flag: ``yes`` or ``no``."""
    return "yes" if flag else "no"


def _page(
    ledger: CollectiveLedger,
    *,
    headers: tuple[str, ...],
    rows: list[tuple[str, ...]],
    numbers: tuple[int, ...],
) -> Page:
    notes = ["roles unknown: the HLO carries no op_name metadata"]
    if ledger.named:
        notes = [
            f"untagged: {c.kind} {c.dtype}{list(c.shape)} {c.op_name}" for c in ledger.activations
        ]
    return Page(
        (Table(title=ledger.summary, headers=headers, rows=rows, numbers=numbers, notes=notes),)
    )


def _role(ledger: CollectiveLedger, collective: Collective) -> str:
    if collective.role:
        return collective.role
    return "unknown" if not ledger.named else "scalar" if collective.is_scalar else "untagged"


def _over_hosts(ledger: CollectiveLedger, cell: _Cell) -> tuple[_Cell, ...]:
    """The cell of the column about traffic between hosts, if there are several hosts."""
    return (cell,) if ledger.hosts > 1 else ()


def _has_loops(ledger: CollectiveLedger) -> bool:
    return any(c.in_loop for c in ledger.collectives)


def _with_loops(ledger: CollectiveLedger, cell: str) -> tuple[str, ...]:
    """The cell of the column of turns, where there are loops: the others are of one turn."""
    return (cell,) if _has_loops(ledger) else ()
