"""DeepSpeed's launcher line, one process where DeepSpeed has one for each GPU; and `launch`."""

from spmdzero.integrations.launcher._launch import launch
from spmdzero.integrations.launcher._options import parse_args
from spmdzero.integrations.launcher.runner import main

__all__ = ["launch", "main", "parse_args"]
