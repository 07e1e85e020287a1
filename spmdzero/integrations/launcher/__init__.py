"""DeepSpeed's launcher line, which starts one process where DeepSpeed starts one for each GPU."""

from spmdzero.integrations.launcher._options import parse_args
from spmdzero.integrations.launcher.runner import main

__all__ = ["main", "parse_args"]
