"""What the compiler did: the collective ledger of one compiled step."""

from ._ledger import Collective, CollectiveLedger

__all__ = ["Collective", "CollectiveLedger"]
