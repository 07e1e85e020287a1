"""Reading the text of an optimised HLO module."""

import dataclasses
import re
from math import prod

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.hlo._module import Instruction, Module, Shape

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,<=]*)\](\{[^{}]*\})?")
# The memory space of the host in a layout (xla/layout.h, kHostMemorySpace).
_HOST = "S(5)"
_HEADER = re.compile(r"(?:ENTRY )?%(?P<name>[\w.\-]+) ?\(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")


def parse(text: str) -> Module:
    """The module that `text` describes.

    Raises:
        SpmdZeroUsageError: the text is not an HLO module with an entry computation.
    """
    header, entry, current = "", "", ""
    computations: dict[str, dict[str, Instruction]] = {}
    for line in _whole_lines(text):
        if line.startswith("HloModule "):
            header = line
        elif found := _HEADER.match(line):
            current = found["name"]
            computations[current] = {}
            if line.startswith("ENTRY "):
                entry = current
        elif current and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found, current)
            computations[current][instruction.name] = instruction
    if not header or not entry:
        raise SpmdZeroUsageError(
            "the text is not one HLO module: it lacks a 'HloModule' header or an ENTRY "
            "computation. Pass the whole text of the optimised module."
        )
    for computation in computations.values():
        for instruction in computation.values():
            computation[instruction.name] = _plain(instruction, computation)
    return Module(header, entry, computations)


def _whole_lines(text: str) -> list[str]:
    """The lines, each instruction as one: a kernel's metadata breaks its line."""
    lines: list[str] = []
    is_open = False
    for line in text.splitlines():
        if _INSTRUCTION.match(line):
            is_open = True
        elif is_open and line not in ("", "}"):
            lines[-1] += line
            continue
        else:
            is_open = False
        lines.append(line)
    return lines


def _plain(instruction: Instruction, siblings: dict[str, Instruction]) -> Instruction:
    """The instruction in the form of others that do the same.

    A call that runs aside is an async-start with all operands, and an async-done, where the text
    has a call-start and a call-done. For a transfer on a SparseCore libtpu prepares it early, and
    names the operands in a call-update, which is when it starts. libtpu 0.0.52 writes custom-call
    in the place of call. A reduction over dims of one element becomes a reshape: libtpu puts one
    after the gather of a vector. libtpu copies a large array in parts, which a custom call joins:
    it becomes a concatenate.
    """
    match instruction.opcode:
        case "call-done" | "custom-call-done":
            return dataclasses.replace(instruction, opcode="async-done")
        case "call-start" | "custom-call-start" if instruction.operands:
            return dataclasses.replace(instruction, opcode="async-start")
        case "call-update" | "custom-call-update":
            prepared, *operands = instruction.operands
            called = siblings[prepared].attributes
            siblings[prepared] = dataclasses.replace(siblings[prepared], attributes="")
            return dataclasses.replace(
                instruction, opcode="async-start", operands=tuple(operands), attributes=called
            )
        case "custom-call" if 'custom_call_target="ConcatBitcast"' in instruction.attributes:
            return dataclasses.replace(instruction, opcode="concatenate")
        case "reduce" if len(instruction.operands) == 2:
            (whole,), (left,) = siblings[instruction.operands[0]].shapes, instruction.shapes
            if prod(whole.dims) == prod(left.dims):
                return dataclasses.replace(
                    instruction, opcode="reshape", operands=instruction.operands[:1]
                )
    return instruction


def _instruction(found: re.Match[str], computation: str) -> Instruction:
    rest = found["rest"]
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, type_end)
    if opcode is None:
        raise SpmdZeroUsageError(
            f"the HLO line of %{found['name']} has no operation: {rest[:80]!r}. Pass the text "
            "as the compiler printed it."
        )
    end = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : end]
    return Instruction(
        name=found["name"],
        computation=computation,
        opcode=opcode["opcode"],
        shapes=shapes(rest[:type_end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments=arguments,
        attributes=rest[end + 1 :],
        is_root=bool(found["root"]),
    )


def shapes(text: str) -> tuple[Shape, ...]:
    """The arrays in a type such as ``(f32[8,16]{1,0}, bf16[])``."""
    return tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), _HOST in layout)
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)
