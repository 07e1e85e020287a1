"""The matrix multiplications and convolutions of a compiled program, and their operations."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from spmdzero.hlo._loops import turns
from spmdzero.hlo._module import Instruction, Module
from spmdzero.hlo._text import parse

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"\bdim_labels=\w+_(\w+)->\w+")


@dataclass(frozen=True)
class Matmul:
    """One dot or convolution of the program that each device runs.

    Attributes:
        op_name: scopes under which it was traced, and its operation.
        macs: multiply-accumulate operations of one device in one run of the program; a loop counts
            as often as the compiler knows it to run.
    """

    op_name: str
    macs: int


def read_matmuls(hlo: str) -> tuple[Matmul, ...]:
    """Every dot and convolution of an optimised, partitioned HLO module's text.

    What XLA turned into other operations, such as a product with a vector of one element, is not
    among them. A convolution counts the positions that padding or dilation fills with zeros.
    """
    return tuple(_matmuls(parse(hlo)))


def _matmuls(module: Module) -> Iterator[Matmul]:
    for instruction in module.instructions():
        if instruction.opcode in ("dot", "convolution"):
            summands = _summands(module, instruction)
            runs = _runs(module, instruction.computation)
            macs = prod(instruction.shapes[0].dims) * summands * runs
            yield Matmul(op_name=instruction.op_name, macs=macs)


def _summands(module: Module, instruction: Instruction) -> int:
    """Products that are summed into one element of the result."""
    left, right = (operand.shapes[0].dims for operand in module.operands(instruction))
    if instruction.opcode == "dot":
        found = _CONTRACTED.search(instruction.attributes)
        dims = found[1] if found else ""
        return prod(left[int(dim)] for dim in dims.split(",") if dim)
    labels = _LABELS.search(instruction.attributes)
    # A convolution without labels has none to sum over but its kernel: HLO always prints them.
    assert labels is not None, instruction.attributes
    return prod(right) // right[labels[1].index("o")]


def _runs(module: Module, computation: str) -> int:
    """How often one run of the program goes through a computation; each branch counts as taken."""
    if computation == module.entry:
        return 1
    return sum(
        (turns(module, caller) if caller.opcode == "while" else 1)
        * _runs(module, caller.computation)
        for caller in module.callers(computation)
    )
