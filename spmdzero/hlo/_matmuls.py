"""The matrix products and convolutions of a compiled program, and their operations."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from spmdzero.hlo._loops import runs
from spmdzero.hlo._module import Instruction, Module
from spmdzero.hlo._text import parse

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
# Opcodes that move elements without changing them.
_REARRANGES = ("bitcast", "copy", "reshape", "transpose")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")


@dataclass(frozen=True)
class Matmul:
    """One dot or convolution of the program that each device runs.

    Attributes:
        op_name: the scopes under which it was traced, and its operation.
        macs: multiply-accumulate operations of one device in one run of the program; a loop counts
            as often as it is known to run.
        dtypes: the operands' dtypes as HLO spells them, such as ``("bf16", "bf16")``.
    """

    op_name: str
    macs: int
    dtypes: tuple[str, ...]

    def times(self, runs: int) -> "Matmul":
        """The same product in so many runs of the program."""
        return replace(self, macs=runs * self.macs)


def read_matmuls(hlo: str, *, exact: bool = False) -> tuple[Matmul, ...]:
    """Every dot and convolution of an optimised, partitioned HLO module's text.

    Products that XLA turned into other operations, such as one with a vector of one element, are
    missing.

    Args:
        exact: leave out products with zeros of padding. libtpu writes batched matrix products as
            convolutions that are mostly such zeros. By default they count, as DeepSpeed's
            profiler and others count a model's convolutions.
    """
    return tuple(_matmuls(parse(hlo), exact=exact))


def _matmuls(module: Module, *, exact: bool) -> Iterator[Matmul]:
    for instruction in module.instructions():
        if instruction.opcode in ("dot", "convolution"):
            macs = (
                _exact_macs(module, instruction)
                if exact and instruction.opcode == "convolution"
                else _macs(module, instruction)
            )
            times = runs(module, instruction.computation)
            yield Matmul(
                op_name=_op_name(module, instruction),
                macs=macs * times,
                dtypes=tuple(o.shapes[0].dtype for o in module.operands(instruction)),
            )


def _op_name(module: Module, instruction: Instruction) -> str:
    """The instruction's scopes, or a reader's if XLA rewrote it without a name.

    XLA does so for a convolution with one output position, which its own bias is the first to read.
    """
    if instruction.op_name:
        return instruction.op_name
    named = [
        use.user.op_name
        for use in module.readers(instruction, through=_REARRANGES)
        if use.user is not None and use.user.op_name
    ]
    return next((name for name in named if "convolution" in name), next(iter(named), ""))


def _macs(module: Module, instruction: Instruction) -> int:
    left, right = (operand.shapes[0].dims for operand in module.operands(instruction))
    if instruction.opcode == "convolution" and "lhs_dilate=" in instruction.attributes:
        # Strided and transposed: each element of the operand meets the kernel once. Between the
        # elements there are only zeros.
        operand, _, _ = _labels(instruction)
        return prod(left) // left[operand.index("f")] * prod(right)
    return prod(instruction.shapes[0].dims) * _summands(module, instruction)


def _summands(module: Module, instruction: Instruction) -> int:
    """Number of products that are summed into one element of the result."""
    left, right = (operand.shapes[0].dims for operand in module.operands(instruction))
    if instruction.opcode == "dot":
        found = _CONTRACTED.search(instruction.attributes)
        dims = found[1] if found else ""
        return prod(left[int(dim)] for dim in dims.split(",") if dim)
    _, kernel, _ = _labels(instruction)
    return prod(right) // right[kernel.index("o")]


def _labels(convolution: Instruction) -> tuple[str, str, str]:
    """Returns for operand, kernel and result the labels of their dims, letters or digits."""
    found = _LABELS.search(convolution.attributes)
    # HLO always prints labels, except for a convolution that sums over nothing but its kernel.
    assert found is not None, convolution.attributes
    return found[1], found[2], found[3]


def _exact_macs(module: Module, convolution: Instruction) -> int:
    left, right = (operand.shapes[0].dims for operand in module.operands(convolution))
    result = convolution.shapes[0].dims
    operand, kernel, made = _labels(convolution)
    window = _WINDOW.search(convolution.attributes)
    told = dict(part.split("=") for part in window[1].split()) if window else {}

    def of(name: str, dim: int, otherwise: str) -> str:
        return told[name].split("x")[dim] if name in told else otherwise

    macs = result[made.index("b")] * result[made.index("f")] * right[kernel.index("i")]
    for dim in range(sum(label.isdigit() for label in made)):
        macs *= _pairs(
            left[operand.index(str(dim))],
            result[made.index(str(dim))],
            right[kernel.index(str(dim))],
            stride=int(of("stride", dim, "1")),
            before=int(of("pad", dim, "0_0").split("_")[0]),
            spread=int(of("lhs_dilate", dim, "1")),
            kernel_spread=int(of("rhs_dilate", dim, "1")),
        )
    return macs


@functools.cache
def _pairs(
    operand: int, result: int, kernel: int, *, stride: int, before: int, spread: int,
    kernel_spread: int,
) -> int:  # fmt: skip
    """Number of pairs of positions in result and kernel that meet an element of the operand.

    It is for one spatial dim; the arguments are its three lengths, and the values of HLO's window.
    """
    return sum(
        0 <= place < operand * spread and place % spread == 0
        for start in range(-before, result * stride - before, stride)
        for place in range(start, start + kernel * kernel_spread, kernel_spread)
    )
