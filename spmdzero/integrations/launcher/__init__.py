"""DeepSpeed's launcher line, one process where DeepSpeed has one for each GPU; and `launch`."""

from spmdzero.integrations.launcher._commands import Remote
from spmdzero.integrations.launcher._launch import Line, launch
from spmdzero.integrations.launcher._options import parse_args
from spmdzero.integrations.launcher.runner import main

__all__ = ["Line", "Remote", "launch", "main", "parse_args"]
