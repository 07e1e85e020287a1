"""Plans, ledgers, findings and explanations as text and as HTML."""

from spmdzero.show import _audit, _flops, _ledger, _plan, _shards
from spmdzero.show._explanation import together
from spmdzero.show._page import Lines, Page, Table

__all__ = ["Lines", "Page", "Table", "together"]

# Imported for what they register with `_display.page_of`.
_REGISTERED = (_audit, _flops, _ledger, _plan, _shards)
