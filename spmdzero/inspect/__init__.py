"""Shows the compiler's work: collective ledgers, and the parts that devices hold."""

from spmdzero.hlo import (
    Collective,
    Matmul,
    entry_argument_bytes,
    peak_temporary_bytes,
    read_matmuls,
)
from spmdzero.inspect._ledger import CollectiveLedger, LedgerDetails
from spmdzero.inspect._measure import measure
from spmdzero.inspect._placed import backend_name, place, propagated
from spmdzero.inspect._record import StepLedgers, record_ledgers
from spmdzero.inspect._shards import Shard, ShardView, local_shards, shards

__all__ = [
    "Collective",
    "CollectiveLedger",
    "LedgerDetails",
    "Matmul",
    "Shard",
    "ShardView",
    "StepLedgers",
    "backend_name",
    "entry_argument_bytes",
    "local_shards",
    "measure",
    "peak_temporary_bytes",
    "place",
    "propagated",
    "read_matmuls",
    "record_ledgers",
    "shards",
]
