"""The number of turns of a compiled loop."""

import re
from collections.abc import Iterator

from spmdzero.hlo._module import Instruction, Module

_TOLD = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NUMBER = re.compile(r"-?\d+")
# Instructions between a counter and its initial constant that don't change the value.
_SAME = frozenset({"copy", "bitcast", "convert", "copy-done", "copy-start"})


def turns(module: Module, loop: Instruction) -> int:
    """Number of turns of a while instruction in one run; 1 where nothing tells it.

    XLA's CPU compiler writes the number. libtpu doesn't: there it is read from a condition that
    compares a counter with a constant, as a scan's does, in one word or in two. Such a counter
    increases by one.
    """
    if told := _TOLD.search(loop.attributes):
        return int(told[1])
    condition = re.search(r"\bcondition=%([\w.\-]+)", loop.attributes)
    if condition is None:
        return 1
    tests = [*map(module.operands, _below(module, condition[1]))]
    limits = [(counter, _constant(module, limit)) for counter, limit in tests]
    # Of a counter of two words the upper one is compared with zero.
    found = [(counter, last) for counter, last in limits if last and counter.element is not None]
    if len(found) != 1:
        return 1
    ((counter, last),) = found
    (state,) = module.operands(loop)
    first = 0
    if state.opcode == "tuple" and counter.element is not None:
        first = _constant(module, module.operands(state)[counter.element]) or 0
    return max(last - first, 0)


def _below(module: Module, condition: str) -> Iterator[Instruction]:
    """Lists what a condition compares: one thing, or all that its root puts together."""
    waiting = [next(i for i in module.computations[condition].values() if i.is_root)]
    while waiting:
        test = waiting.pop()
        if test.opcode in ("and", "or"):
            waiting += module.operands(test)
        elif test.opcode == "compare" and "direction=LT" in test.attributes:
            yield test


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
