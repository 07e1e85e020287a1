"""The collective ledger: which bytes one compiled step moves, and for which tensor."""

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
        collectives: in the order of the HLO text; a combined collective has one entry a tensor.
        aliased: number of inputs whose buffer an output reuses (donated inputs); None: unknown.
        parameters: number of inputs of the compiled step.
        named: whether the HLO carries op_name metadata at all; without it no role is known.
        hosts: over which the devices are spread.
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
    ) -> "CollectiveLedger":
        """The ledger of one optimised, SPMD-partitioned HLO module.

        Args:
            text: the module as the compiler prints it.
            aliased: the number of donated inputs, for a text whose compilation left donation
                out; by default it is read from the text's ``input_output_alias``.
            outputs: the program's outputs in order, such as ``"parameter/wte.weight"``: they name
                collectives of which the compiler kept no name.
            hosts: over which the program's devices are spread evenly, one host's after another's.

        Raises:
            SpmdZeroUsageError: ``text`` is not one HLO module, or does not say how many devices
                a collective spans.
        """
        module = parse(text)
        found = (
            collective for _, collective in read_collectives(module, outputs=outputs, hosts=hosts)
        )
        return dataclasses.replace(cls.of(module, found, aliased=aliased), hosts=hosts)

    @classmethod
    def of(
        cls, module: Module, collectives: Iterable[Collective], *, aliased: int | None = None
    ) -> "CollectiveLedger":
        """The ledger of a module whose collectives were read before."""
        return cls(
            collectives=tuple(collectives),
            aliased=module.aliased if aliased is None else aliased,
            parameters=module.parameters,
            named=any(instruction.op_name for instruction in module.instructions()),
        )

    @property
    def activations(self) -> tuple[Collective, ...]:
        """The leaks: collectives that serve no tensor that ZeRO moves, and are no scalar.

        A scalar without a tag is a loss that was computed outside of the module. With
        ``"forward": "global"`` a gradient is summed where the compiler likes, outside of any tag,
        and is listed here too.

        Raises:
            SpmdZeroUsageError: the HLO carries no op_name metadata, so nothing can be called a
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
        """How many tensors each kind of collective moves; in a loop one at each turn."""
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
        """How much moves, in one line."""
        donated = "?" if self.aliased is None else self.aliased
        over = f" {self.host_bytes:,} between hosts, per host;" if self.hosts > 1 else ""
        return (
            f"collectives: {len(self.collectives)}, {self.bytes:,} bytes, "
            f"{self.wire_bytes:,} on the wire, per device;{over} "
            f"donated inputs: {donated}"
        )

    def details(self) -> str:
        """A text table with one line for each collective, the tensor that it serves included."""
        return str(LedgerDetails(self))


@dataclass(frozen=True)
class LedgerDetails(Shown):
    """A ledger that is shown collective by collective."""

    ledger: CollectiveLedger
