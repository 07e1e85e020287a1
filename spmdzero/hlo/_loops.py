"""How often a compiled loop turns."""

import re

from spmdzero.hlo._module import Instruction, Module

_TOLD = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NUMBER = re.compile(r"-?\d+")
# What stands between a counter and the constant that it starts from, and makes nothing new of it.
_SAME = frozenset({"copy", "bitcast", "convert", "copy-done", "copy-start"})


def turns(module: Module, loop: Instruction) -> int:
    """How often one run of a while instruction goes through its body; 1 where nothing tells.

    XLA's CPU compiler writes it down. libtpu doesn't: there it is read from a condition that
    compares a counter with a constant, as a scan's does. Such a counter goes up by one.
    """
    if told := _TOLD.search(loop.attributes):
        return int(told[1])
    condition = re.search(r"\bcondition=%([\w.\-]+)", loop.attributes)
    if condition is None:
        return 1
    test = next(i for i in module.computations[condition[1]].values() if i.is_root)
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return 1
    counter, limit = module.operands(test)
    last = _constant(module, limit)
    if counter.element is None or last is None:
        return 1
    (state,) = module.operands(loop)
    first = 0
    if state.opcode == "tuple":
        first = _constant(module, module.operands(state)[counter.element]) or 0
    return max(last - first, 0)


def runs(module: Module, computation: str) -> int:
    """How often one run of the program goes through a computation; each branch counts as taken."""
    if computation == module.entry:
        return 1
    return sum(
        (turns(module, caller) if caller.opcode == "while" else 1)
        * runs(module, caller.computation)
        for caller in module.callers(computation)
    )


def _constant(module: Module, value: Instruction) -> int | None:
    *_, made = module.origin(value, through=_SAME)
    found = _NUMBER.fullmatch(made.arguments.strip()) if made.opcode == "constant" else None
    return int(found[0]) if found else None
