"""Plans, ledgers, findings and explanations as text and as HTML."""

# These modules are imported because they register functions with `_display.page_of`.
from spmdzero.show import _audit, _flops, _ledger, _plan, _shards, _training  # noqa: F401
from spmdzero.show._explanation import together
from spmdzero.show._page import Table
from spmdzero.show._training import plans_together

__all__ = ["Table", "plans_together", "together"]
