"""DeepSpeed's launcher command, which starts one process per host, and `spmdzero launch`."""

from spmdzero.integrations.launcher._commands import Remote
from spmdzero.integrations.launcher._launch import Line, launch
from spmdzero.integrations.launcher._options import parse_args
from spmdzero.integrations.launcher.runner import main

__all__ = ["Line", "Remote", "launch", "main", "parse_args"]
