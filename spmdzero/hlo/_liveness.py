"""The memory of device and host that a compiled program takes, from its schedule."""

from spmdzero.hlo._module import Instruction, Module
from spmdzero.hlo._text import parse

# These rename memory that exists already, or hold none.
_VIEWS = frozenset({"bitcast", "tuple", "get-tuple-element", "optimization-barrier", "copy-done"})
_NO_MEMORY = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id"})


def entry_argument_bytes(text: str, *, on_host: bool = False) -> int:
    """Bytes of one device's inputs of the optimised program `text`.

    Args:
        text: as from `StepGraph.hlo()`.
        on_host: count the inputs in the host's memory, not those in the device's.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module.
        SpmdZeroUsageError: the text is not a whole HLO module.
    """
    module = parse(text)
    entry = module.computations[module.entry].values()
    return sum(_bytes(i, on_host=on_host) for i in entry if i.opcode == "parameter")


def peak_temporary_bytes(text: str, *, on_host: bool = False) -> int:
    """The most bytes that one device holds at once in values between inputs and outputs.

    Walks the entry computation in the order in which the compiler scheduled it. A value lives from
    the instruction that makes it to the last one that reads it, results until the end. Inputs and
    constants don't count. This is an upper estimate: the compiler also lets a value take the
    memory of an operand that dies there, and in the device's memory an output take that of a
    donated input.

    Args:
        text: the optimised HLO of one program, as from `StepGraph.hlo()`.
        on_host: count the values of one device in the host's memory, not those in its own. There
            a value that takes the memory of a donated input doesn't count.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module.
    """
    module = parse(text)
    instructions = list(module.computations[module.entry].values())
    owners: dict[str, frozenset[str]] = {}
    last_read: dict[str, int] = {}
    given = frozenset[str]()
    for position, instruction in enumerate(instructions):
        read = frozenset[str]().union(*(owners[name] for name in instruction.operands))
        for name in read:
            last_read[name] = position
        owners[instruction.name] = (
            read if instruction.opcode in _VIEWS else frozenset({instruction.name})
        )
        if instruction.is_root:
            last_read |= dict.fromkeys(owners[instruction.name], len(instructions))
            if on_host:
                given = given.union(*(owners[name] for name in _in_place(module, instruction)))
    live = peak = 0
    ends: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if instruction.opcode not in _VIEWS | _NO_MEMORY and instruction.name not in given:
            size = _bytes(instruction, on_host=on_host)
            live += size
            peak = max(peak, live)
            end = last_read.get(instruction.name, position)
            ends[end] = ends.get(end, 0) + size
        live -= ends.pop(position, 0)
    return peak


def _in_place(module: Module, root: Instruction) -> tuple[str, ...]:
    """The values of the root that take the memory of a donated input."""
    if root.opcode != "tuple":
        return (root.name,) if module.aliased else ()
    return tuple(root.operands[place] for place in module.aliased_outputs)


def _bytes(instruction: Instruction, *, on_host: bool) -> int:
    # The start of a copy also names its source, which another instruction made.
    made = instruction.shapes[: 1 if instruction.opcode == "copy-start" else None]
    return sum(shape.bytes for shape in made if shape.on_host == on_host)
