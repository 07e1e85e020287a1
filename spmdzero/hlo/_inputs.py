"""The inputs of a program from which a value is only moved, by their names."""

from collections.abc import Iterator, Sequence

from spmdzero._names import in_common
from spmdzero.hlo._module import Instruction, Module

# Opcodes whose result has elements of their first operand alone, or of all operands.
_OF_THE_FIRST = frozenset({"convert", "copy", "bitcast", "reshape", "transpose", "slice", "pad"})
_OF_THE_FIRST |= {"dynamic-slice", "copy-start", "copy-done", "slice-start", "slice-done"}
_OF_THE_FIRST |= {"recv-done", "recv"}
# libtpu puts parts together as the maximum of padded ones.
_OF_ALL = frozenset({"concatenate", "dynamic-update-slice", "maximum"})


def moved_from(module: Module, value: Instruction, outputs: Sequence[str]) -> str:
    """The name of the input that `value` is a part of, unchanged or cast; "" if none is known.

    What a loop takes of a stack of inputs has the name of all: ``parameter/blocks.*.up.weight``.

    Args:
        module: the program; an input has the name of the output that reuses its buffer.
        value: what is asked for.
        outputs: the program's outputs in order, as ``role/tensor``.
    """
    known = {number: outputs[place] for place, number in module.reused if place < len(outputs)}
    return in_common({known.get(number, "") for number in _inputs_behind(module, value)})


def _inputs_behind(module: Module, value: Instruction) -> Iterator[int]:
    pending: list[tuple[Instruction, int | None]] = [(value, None)]
    seen = set[tuple[tuple[str, str], int | None]]()
    while pending:
        at, element = pending.pop()
        if (at.key, element) in seen:
            continue
        seen.add((at.key, element))
        if at.opcode == "parameter" and at.computation == module.entry:
            yield int(at.arguments)
        else:
            pending += _one_step_back(module, at, element)


def _one_step_back(
    module: Module, at: Instruction, element: int | None
) -> Iterator[tuple[Instruction, int | None]]:
    """The values of which `at`, or its element, has elements, each with the element wanted."""
    if at.opcode == "parameter":
        for caller in module.callers(at.computation):
            # A loop's body has one parameter, the tuple that the loop carries.
            place = 0 if caller.opcode == "while" else int(at.arguments)
            yield module.operands(caller)[place], element
    elif at.opcode == "fusion":
        yield module.root(at.called[0]), element
    elif at.opcode == "get-tuple-element":
        yield module.operands(at)[0], at.element
    elif at.opcode == "tuple" and element is not None:
        yield module.operands(at)[element], None
    elif at.opcode == "while":
        yield module.operands(at)[0], element
    elif at.opcode == "select":
        yield from ((operand, None) for operand in module.operands(at)[1:])
    elif at.opcode in _OF_ALL:
        yield from ((operand, None) for operand in module.operands(at))
    elif at.opcode in _OF_THE_FIRST:
        yield module.sources(at)[0], element if at.opcode == "recv-done" else None
