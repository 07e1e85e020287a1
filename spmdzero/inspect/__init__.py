"""What the compiler did: collective ledgers, and what the devices hold."""

from spmdzero.inspect._ledger import Collective, CollectiveLedger
from spmdzero.inspect._liveness import peak_temporary_bytes
from spmdzero.inspect._measure import measure
from spmdzero.inspect._record import StepLedgers, record_ledgers

__all__ = [
    "Collective",
    "CollectiveLedger",
    "StepLedgers",
    "measure",
    "peak_temporary_bytes",
    "record_ledgers",
]
