"""Records the ledgers of the programs that an engine runs."""

import contextlib
import dataclasses
from collections.abc import Iterator

from spmdzero.backend import runtime
from spmdzero.engine import Engine, StepGraph
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect._ledger import CollectiveLedger


@dataclasses.dataclass
class StepLedgers:
    """The ledger of each kind of program that ran while recording.

    Attributes:
        by_kind: ``"boundary"`` is the program of a step's last micro-batch, ``"micro"`` the program
            of the other micro-batches.
    """

    by_kind: dict[str, CollectiveLedger] = dataclasses.field(default_factory=dict)

    @property
    def micro(self) -> CollectiveLedger:
        """The ledger of a micro-batch before the gradient accumulation boundary."""
        return self._of("micro")

    @property
    def boundary(self) -> CollectiveLedger:
        """The ledger of the micro-batch at the boundary, including the update."""
        return self._of("boundary")

    def _of(self, kind: str) -> CollectiveLedger:
        if kind not in self.by_kind:
            raise SpmdZeroUsageError(
                f"no {kind} program ran while recording: train one whole step inside "
                "`with spmdzero.record_ledgers(engine) as ledgers:`"
            )
        return self.by_kind[kind]


@contextlib.contextmanager
def record_ledgers(engine: Engine) -> Iterator[StepLedgers]:
    """Reads the collectives of every kind of program that `engine` runs inside the context.

    Each kind is compiled once more for its text. The training itself is not changed.
    """
    ledgers, texts = StepLedgers(), dict[str, tuple[str, tuple[str, ...]]]()

    def read(graph: StepGraph) -> None:
        if graph.kind not in texts:
            texts[graph.kind] = graph.hlo(), graph.returned

    with engine.observe(read):
        yield ledgers
    for kind, (text, outputs) in texts.items():
        # The text is compiled without donation; the engine counted the donated inputs at the first
        # run.
        ledger = CollectiveLedger.from_hlo(
            text,
            outputs=outputs,
            hosts=runtime.process_count(),
            **engine.mesh.spec.sharing,
        )
        donated = engine.donated_inputs.get(kind)
        ledgers.by_kind[kind] = dataclasses.replace(ledger, aliased=donated)
