"""How much memory a compiled program's temporaries take, read off its schedule."""

from spmdzero.hlo._text import parse

# They give another name to memory that is there already, or hold none.
_VIEWS = frozenset({"bitcast", "tuple", "get-tuple-element", "optimization-barrier"})
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

    Goes through the entry computation in the order in which the compiler scheduled it; a value
    lives from the instruction that makes it to the last that reads it, results until the end.
    Inputs and constants don't count. An estimate from above: the compiler also lets a value
    take the place of an operand that dies there, and an output that of a donated input.

    Args:
        text: the optimised HLO of one program, as `StepGraph.hlo()` gives it.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module.
    """
    module = parse(text)
    instructions = list(module.computations[module.entry].values())
    owners: dict[str, frozenset[str]] = {}
    last_read: dict[str, int] = {}
    for position, instruction in enumerate(instructions):
        read = frozenset[str]().union(*(owners[name] for name in instruction.operands))
        for name in read:
            last_read[name] = position
        owners[instruction.name] = (
            read if instruction.opcode in _VIEWS else frozenset({instruction.name})
        )
        if instruction.is_root:
            last_read |= dict.fromkeys(owners[instruction.name], len(instructions))
    live = peak = 0
    ends: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if instruction.opcode not in _VIEWS | _NO_MEMORY:
            size = sum(shape.bytes for shape in instruction.shapes)
            live += size
            peak = max(peak, live)
            end = last_read.get(instruction.name, position)
            ends[end] = ends.get(end, 0) + size
        live -= ends.pop(position, 0)
    return peak
