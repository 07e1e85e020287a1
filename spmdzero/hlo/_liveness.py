"""The memory of device and host that a compiled program takes, from its schedule."""

import re
from collections.abc import Iterable, Mapping

from spmdzero.hlo._module import Instruction, Module
from spmdzero.hlo._text import parse

# These rename memory that exists already, or hold none. A loop turns in the memory of its inputs.
_VIEWS = frozenset({"bitcast", "optimization-barrier", "copy-done", "while"})
_IN_PLACE = "dynamic-update-slice"
_NO_MEMORY = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id"})


def entry_argument_bytes(text: str, *, on_host: bool = False) -> int:
    """Bytes of one device's inputs of the optimised program `text`.

    Args:
        text: as from `StepGraph.hlo()`.
        on_host: count the inputs in the host's memory, not those in the device's.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module.
    """
    module = parse(text)
    entry = module.computations[module.entry].values()
    return sum(_bytes(i, on_host=on_host) for i in entry if i.opcode == "parameter")


def peak_temporary_bytes(text: str, *, on_host: bool = False) -> int:
    """The most bytes that one device holds at once in values between inputs and outputs.

    Walks the entry computation, and the bodies of its loops, in the order in which the compiler
    scheduled them. A value lives from the instruction that makes it to the last one that reads it,
    results until the end. Inputs and constants don't count. This is an upper estimate: the compiler
    also lets a value take the memory of an operand that dies there, and in the device's memory an
    output take that of a donated input.

    Args:
        text: the optimised HLO of one program, as from `StepGraph.hlo()`.
        on_host: count the values of one device in the host's memory, not those in its own. There
            a value that takes the memory of a donated input doesn't count.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module.
    """
    module = parse(text)
    return _peak(module, module.entry, on_host=on_host)


def _peak(module: Module, computation: str, *, on_host: bool) -> int:
    instructions = list(module.computations[computation].values())
    # Of each element of an instruction's result, the instructions that made its memory.
    owners: dict[str, tuple[frozenset[str], ...]] = {}
    last_read: dict[str, int] = {}
    made: dict[str, int] = {}
    donated = frozenset[str]()
    for position, instruction in enumerate(instructions):
        memory = _owners(module, instruction, owners)
        for name in _all(owners[name] for name in instruction.operands):
            last_read[name] = position
        if memory is None:
            memory = (frozenset({instruction.name}),)
            if instruction.opcode not in _NO_MEMORY:
                made[instruction.name] = _bytes(instruction, on_host=on_host)
        owners[instruction.name] = memory
        if instruction.is_root:
            last_read |= dict.fromkeys(_all([memory]), len(instructions))
            if on_host and computation == module.entry:
                donated = _all(owners[name] for name in _in_place(module, instruction))
    live = peak = 0
    ends: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        size = 0 if instruction.name in donated else made.get(instruction.name, 0)
        live += size
        inside = (_peak(module, name, on_host=on_host) for name in _body(instruction))
        peak = max(peak, live + sum(inside))
        end = last_read.get(instruction.name, position)
        ends[end] = ends.get(end, 0) + size
        live -= ends.pop(position, 0)
    return peak


def _all(elements: Iterable[Iterable[frozenset[str]]]) -> frozenset[str]:
    return frozenset[str]().union(*(names for each in elements for names in each))


def _owners(
    module: Module, instruction: Instruction, known: Mapping[str, tuple[frozenset[str], ...]]
) -> tuple[frozenset[str], ...] | None:
    """Lists of each element the instructions that made its memory; None for new memory."""
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
    """The body of a loop; nothing for another instruction."""
    found = re.search(r"\bbody=%([\w.\-]+)", instruction.attributes)
    return (found[1],) if instruction.opcode == "while" and found else ()


def _written_in_place(module: Module, instruction: Instruction) -> str | None:
    """The operand whose memory takes the result; None for new memory."""
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


def _in_place(module: Module, root: Instruction) -> tuple[str, ...]:
    """The values of the root that take the memory of a donated input."""
    if root.opcode != "tuple":
        return (root.name,) if module.aliased else ()
    return tuple(root.operands[place] for place in module.aliased_outputs)


def _bytes(instruction: Instruction, *, on_host: bool) -> int:
    # The start of a copy also names its source, which another instruction made.
    made = instruction.shapes[: 1 if instruction.opcode == "copy-start" else None]
    return sum(shape.bytes for shape in made if shape.on_host == on_host)
