"""Plans, ledgers, findings and explanations as text and as HTML."""

# These modules are imported because they register functions with `_display.page_of`.
from spmdzero.show import _audit, _flops, _ledger, _plan, _shards  # noqa: F401
from spmdzero.show._explanation import together
from spmdzero.show._page import Table

__all__ = ["Table", "together"]
