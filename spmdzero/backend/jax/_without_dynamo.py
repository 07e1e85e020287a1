"""Shapes of operations without torch's compiler, which takes a second of each start to import.

torch writes the results' forms of many operations in Python, and hides that Python from its
compiler: the first call of each such function imports `torch._dynamo` to be wrapped by it, and
keeps the result as an attribute (torch/_compile.py).
"""

import functools
import sys
from types import CellType, FunctionType

import torch
from torch._decomp import global_decomposition_table

# Where another torch has no such attribute, nothing is gained and nothing lost.
_KEPT = "__dynamo_disable"


@functools.cache
def leave_dynamo_out() -> None:
    """Has torch's Python for forms of results call itself as it is, unless dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        return
    known = set[FunctionType]()
    waiting = [each for table in global_decomposition_table.values() for each in table.values()]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in known:
            continue
        known.add(function)
        # One decorator around another has it in a variable of its own.
        within = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        waiting += within
        if function.__code__ is _HIDING:
            for hidden in within:
                vars(hidden).setdefault(_KEPT, hidden)


def _is_filled(cell: CellType) -> bool:
    # A variable that isn't set yet has a cell without contents.
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False


_HIDING = torch._disable_dynamo(lambda: None).__code__  # type: ignore[missing-attribute]
