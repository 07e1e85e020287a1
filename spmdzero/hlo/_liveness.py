"""How much memory a compiled program's temporaries take, read off its schedule."""

import re
from collections.abc import Mapping

from spmdzero.hlo._module import Instruction, Module
from spmdzero.hlo._text import parse

# They give another name to memory that is there already, or hold none. A loop turns in the memory
# of what it begins with.
_VIEWS = frozenset({"bitcast", "optimization-barrier", "while"})
_IN_PLACE = "dynamic-update-slice"
_NO_MEMORY = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id"})


def entry_argument_bytes(text: str) -> int:
    """Bytes of one device's inputs of the optimised program `text`.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module.
    """
    module = parse(text)
    entry = module.computations[module.entry].values()
    return sum(shape.bytes for i in entry if i.opcode == "parameter" for shape in i.shapes)


def peak_temporary_bytes(text: str) -> int:
    """The most bytes that one device holds at once in values between inputs and outputs.

    Goes through the entry computation, and the bodies of its loops, in the order in which the
    compiler scheduled them; a value lives from the instruction that makes it to the last that
    reads it, results until the end. Inputs and constants don't count. An estimate from above: the
    compiler also lets a value take the place of an operand that dies there, and an output that of
    a donated input.

    Args:
        text: the optimised HLO of one program, as `StepGraph.hlo()` gives it.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module.
    """
    module = parse(text)
    return _peak(module, module.entry)


def _peak(module: Module, computation: str) -> int:
    instructions = list(module.computations[computation].values())
    # Of each element of what an instruction returns, the instructions whose memory it is in.
    owners: dict[str, tuple[frozenset[str], ...]] = {}
    last_read: dict[str, int] = {}
    made: dict[str, int] = {}
    for position, instruction in enumerate(instructions):
        read = _owners(module, instruction, owners)
        given = (each for name in instruction.operands for each in owners[name])
        for name in frozenset[str]().union(*given):
            last_read[name] = position
        if read is None:
            read = (frozenset({instruction.name}),)
            if instruction.opcode not in _NO_MEMORY:
                made[instruction.name] = sum(shape.bytes for shape in instruction.shapes)
        owners[instruction.name] = read
        if instruction.is_root:
            last_read |= dict.fromkeys(frozenset[str]().union(*read), len(instructions))
    live = peak = 0
    ends: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        size = made.get(instruction.name, 0)
        live += size
        inside = (_peak(module, name) for name in _body(instruction))
        peak = max(peak, live + sum(inside))
        end = last_read.get(instruction.name, position)
        ends[end] = ends.get(end, 0) + size
        live -= ends.pop(position, 0)
    return peak


def _owners(
    module: Module, instruction: Instruction, known: Mapping[str, tuple[frozenset[str], ...]]
) -> tuple[frozenset[str], ...] | None:
    """Of each element the instructions in whose memory it is; None for memory of its own."""
    given = [known[name] for name in instruction.operands]
    if instruction.opcode == "tuple":
        return tuple(frozenset[str]().union(*each) for each in given)
    if instruction.opcode == "get-tuple-element":
        (each,), place = given, instruction.element
        return (each[place],) if place is not None and place < len(each) else each
    if instruction.opcode in _VIEWS:
        return given[0]
    written = _written_in_place(module, instruction)
    return None if written is None else known[written]


def _body(instruction: Instruction) -> tuple[str, ...]:
    """The computation that a loop turns through."""
    found = re.search(r"\bbody=%([\w.\-]+)", instruction.attributes)
    return (found[1],) if instruction.opcode == "while" and found else ()


def _written_in_place(module: Module, instruction: Instruction) -> str | None:
    """The operand whose memory the instruction writes its result into, None where it makes new."""
    root, place = instruction, 0
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called[0]]
        root = next(i for i in body.values() if i.is_root)
        if root.opcode == _IN_PLACE:
            *_, stack = module.origin(module.operands(root)[0], through={"bitcast"})
            if stack.opcode != "parameter" or stack.computation != root.computation:
                return None
            place = int(stack.arguments)
    return instruction.operands[place] if root.opcode == _IN_PLACE else None
