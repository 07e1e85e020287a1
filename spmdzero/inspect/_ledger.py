"""The collective ledger: the bytes that one compiled step moves, and for which tensor."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from spmdzero._display import Shown
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.hlo import Collective, Module, parse, read_collectives


@dataclass(frozen=True, kw_only=True, repr=False)
class CollectiveLedger(Shown):
    """Every collective of one compiled step.

    Attributes:
        collectives: entries in the order of the HLO text; a combined collective has one per tensor.
        aliased: number of inputs whose buffer an output reuses (donated inputs); None if unknown.
        parameters: number of inputs of the compiled step.
        named: whether the HLO has op_name metadata at all; without it no role is known.
        hosts: number of hosts over which the devices are spread.
    """

    collectives: tuple[Collective, ...]
    aliased: int | None
    parameters: int
    named: bool
    hosts: int = 1

    @classmethod
    def from_hlo(
        cls,
        text: str,
        *,
        aliased: int | None = None,
        outputs: Sequence[str] = (),
        hosts: int = 1,
        tensor: int = 1,
        sequence: int = 1,
    ) -> "CollectiveLedger":
        """The ledger of one optimised, SPMD-partitioned HLO module.

        Args:
            text: the module as the compiler prints it.
            aliased: the number of donated inputs, for a text that was compiled without donation; by
                default it is read from the text's ``input_output_alias``.
            outputs: the program's outputs in order, such as ``"parameter/wte.weight"``: they name
                collectives whose names the compiler has dropped.
            hosts: number of hosts over which the program's devices are spread evenly, host by host.
            tensor, sequence: sizes of the mesh's axes of these names: so many neighbours share a
                replica's work, and their collectives without a tag have the axis's name as role.

        Raises:
            SpmdZeroUsageError: ``text`` is not one HLO module, or does not give the number of
                devices that a collective spans.
        """
        module = parse(text)
        found = (
            collective
            for _, collective in read_collectives(
                module, outputs=outputs, hosts=hosts, tensor=tensor, sequence=sequence
            )
        )
        return dataclasses.replace(cls.of(module, found, aliased=aliased), hosts=hosts)

    @classmethod
    def of(
        cls, module: Module, collectives: Iterable[Collective], *, aliased: int | None = None
    ) -> "CollectiveLedger":
        """The ledger of a module with given collectives."""
        return cls(
            collectives=tuple(collectives),
            aliased=module.aliased if aliased is None else aliased,
            parameters=module.parameters,
            named=any(instruction.op_name for instruction in module.instructions()),
        )

    @property
    def activations(self) -> tuple[Collective, ...]:
        """The leaks: collectives that serve no tensor of ZeRO and move no scalar.

        A scalar without a tag is a loss that was computed outside of the module. With a global
        forward the compiler sums a gradient anywhere, outside of any tag, and the sum is listed
        here too.

        Raises:
            SpmdZeroUsageError: the HLO has no op_name metadata, so no collective can be called a
                leak.
        """
        if not self.named:
            raise SpmdZeroUsageError(
                "the HLO carries no op_name metadata, so the ledger can't tell a leak from a "
                "gradient. Trace the step with IR debug on, then compile it again."
            )
        return tuple(c for c in self.of_role("") if not c.is_scalar)

    @property
    def bytes(self) -> int:
        """Sum of ``Collective.bytes``, bytes per device, of each turn of a loop."""
        return sum(c.turns * c.bytes for c in self.collectives)

    @property
    def wire_bytes(self) -> int:
        """Sum of ``Collective.wire_bytes``, bytes per device, of each turn of a loop."""
        return sum(c.turns * c.wire_bytes for c in self.collectives)

    @property
    def host_bytes(self) -> int:
        """Sum of ``Collective.host_bytes``, bytes per host, of each turn of a loop."""
        return sum(c.turns * c.host_bytes for c in self.collectives)

    def of_role(self, role: str) -> tuple[Collective, ...]:
        """The collectives tagged with this role."""
        return tuple(c for c in self.collectives if c.role == role)

    def by_kind(self) -> Counter[str]:
        """Kind of collective -> number of tensors that it moves; in a loop one at each turn."""
        found: Counter[str] = Counter()
        for c in self.collectives:
            found[c.kind] += c.turns
        return found

    def to_json(self) -> str:
        """The ledger as JSON text: an object with this class's attributes."""
        return json.dumps(asdict(self), indent=2)

    def __repr__(self) -> str:
        return f"CollectiveLedger({self.summary})"

    @property
    def summary(self) -> str:
        """The amount of traffic, in one line."""
        donated = "?" if self.aliased is None else self.aliased
        over = f" {self.host_bytes:,} between hosts, per host;" if self.hosts > 1 else ""
        return (
            f"collectives: {len(self.collectives)}, {self.bytes:,} bytes, "
            f"{self.wire_bytes:,} on the wire, per device;{over} "
            f"donated inputs: {donated}"
        )

    def details(self) -> str:
        """A text table with one line for each collective and its tensor."""
        return str(LedgerDetails(self))


@dataclass(frozen=True)
class LedgerDetails(Shown):
    """Shows a ledger collective by collective."""

    ledger: CollectiveLedger
