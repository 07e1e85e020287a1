"""The operations of a compiled program in the order in which they run, with what each costs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdzero.hlo._collectives import read_collectives
from spmdzero.hlo._loops import turns
from spmdzero.hlo._module import Instruction, Module, Shape
from spmdzero.hlo._text import parse

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
# Pallas writes an author's own count into the call's configuration, with numbers as JSON has them.
_STATED = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_SAID = re.compile(r"kernel_metadata=\{(.*?)\}\}")
_NUMBER = re.compile(r'"(\w+)":\s*"?(-?\d+)')
# Transfers that libtpu fuses with other work are told apart by their channels.
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CHAIN_START, _CHAIN_END = (f'custom_call_target="AsyncCollective{x}"' for x in ("Start", "Done"))
# A dot's batch dims; libtpu's spelling of them: as many places as the window has, all but one of
# them zeros.
_BATCH = re.compile(r"\blhs_batch_dims=\{\d|\bwindow=\{size=(\d+)\b[^}]*\blhs_dilate=\1\b")
_PRODUCTS = frozenset({"dot", "convolution"})


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A Pallas kernel: code that the TPU's compiler takes as it is, and estimates nothing of.

    Attributes:
        name: the name of its call, which begins with the kernel's.
        operands: the arrays that one call reads, shapes on one device.
        results: the arrays that one call writes.
        flops: operations of one call by its author's count; None where he gave none.
        bytes_accessed: bytes that one call reads and writes, likewise.
        said: what its author wrote beside it, such as the sizes of its blocks, as JSON.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    flops: int | None
    bytes_accessed: int | None
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a schedule.

    Attributes:
        name: its name in the text.
        opcode: as HLO spells it.
        op_names: its own ``op_name``, then those of what is fused into it, then those of the loops
            and calls that it runs in, the innermost first.
        opcodes: its own opcode and those of what is fused into it.
        products: the ``op_name`` of each dot and convolution among these.
        batched: whether one of them multiplies matrices of a batch, each with its own.
        source: ``file:line`` that traced it, "" if the text doesn't tell.
        cycles: the compiler's estimate of one run; None where it wrote none.
        wire_bytes: what one device sends in one run, bytes, as `Collective` counts them.
        kernel: the kernel that it calls, None if it calls none.
        asynchronous: it only starts its transfer, which another operation `ends`.
        ends: the operation whose transfer it waits for, by name; "" if it waits for none.
        bodies: what it runs, where its time is theirs: a loop's body, each branch of a condition.
        trips: how often they run in one run of it; 1 for a loop whose turns nobody knows.
    """

    name: str
    opcode: str
    op_names: tuple[str, ...]
    opcodes: frozenset[str]
    products: tuple[str, ...]
    batched: bool
    source: str
    cycles: int | None
    wire_bytes: int
    kernel: Kernel | None
    asynchronous: bool
    ends: str
    bodies: tuple[tuple["Operation", ...], ...]
    trips: int


def read_schedule(hlo: str) -> tuple[Operation, ...]:
    """The operations of an optimised program's entry computation, in the order in which they run.

    libtpu estimates the cycles of what it compiles, ``estimated_cycles`` in the text: the memory's
    time included, and neither kernels nor collectives. XLA's CPU compiler writes no estimates.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module, or it does not say how many devices
            a collective spans.
    """
    module = parse(hlo)
    wire: dict[tuple[str, str], int] = {}
    for instruction, collective in read_collectives(module):
        wire[instruction.key] = wire.get(instruction.key, 0) + collective.wire_bytes
    return _Schedule(module, wire).of(module.entry)


def each_operation(
    schedule: Sequence[Operation], *, runs: int = 1
) -> Iterator[tuple[Operation, int]]:
    """Every operation that has a time of its own, and how often one run of the program runs it."""
    for operation in schedule:
        if not operation.bodies:
            yield operation, runs
        for body in operation.bodies:
            yield from each_operation(body, runs=runs * operation.trips)


class _Schedule:
    def __init__(self, module: Module, wire: dict[tuple[str, str], int]) -> None:
        self._module, self._wire = module, wire
        self._started: dict[str, str] = {}

    def of(self, computation: str, around: tuple[str, ...] = ()) -> tuple[Operation, ...]:
        """The operations of one computation; `around` has the names of what it runs in."""
        found = self._module.computations[computation].values()
        return tuple(self._operation(instruction, around) for instruction in found)

    def _operation(self, instruction: Instruction, around: tuple[str, ...]) -> Operation:
        entered = self._entered(instruction)
        fused = [] if entered else list(self._fused(instruction))
        parts = (instruction, *fused)
        products = [part for part in parts if part.opcode in _PRODUCTS]
        op_names = [part.op_name for part in parts]
        cycles = _CYCLES.search(instruction.attributes)
        asynchronous, ends = self._transfer(instruction, fused)
        return Operation(
            name=instruction.name,
            opcode=instruction.opcode,
            op_names=tuple(dict.fromkeys(filter(None, (*op_names, *around)))),
            opcodes=frozenset(part.opcode for part in parts),
            products=tuple(product.op_name for product in products),
            batched=any(_BATCH.search(product.attributes) for product in products),
            source=instruction.source,
            cycles=int(cycles[1]) if cycles and not entered else None,
            wire_bytes=sum(self._wire.get(part.key, 0) for part in parts),
            kernel=self._kernel(instruction) if _KERNEL in instruction.attributes else None,
            asynchronous=asynchronous,
            ends=ends,
            bodies=tuple(self.of(name, (instruction.op_name, *around)) for name in entered),
            trips=turns(self._module, instruction) if instruction.opcode == "while" else 1,
        )

    def _transfer(self, instruction: Instruction, fused: list[Instruction]) -> tuple[bool, str]:
        """Whether an operation only starts a transfer, and whose it waits for."""
        if instruction.opcode.endswith("-start"):
            return True, ""
        if instruction.opcode.endswith("-done"):
            return False, instruction.operands[0]
        channels = [found[1] for part in fused if (found := _CHANNEL.search(part.attributes))]
        starts = any(_CHAIN_START in part.attributes for part in fused)
        if starts:
            self._started |= dict.fromkeys(channels, instruction.name)
        ended = any(_CHAIN_END in part.attributes for part in fused)
        ends = next((self._started[c] for c in channels if c in self._started), "")
        return starts, ends if ended else ""

    def _entered(self, instruction: Instruction) -> tuple[str, ...]:
        """The computations whose operations have the instruction's time."""
        if instruction.opcode == "while":
            found = re.search(r"\bbody=%([\w.\-]+)", instruction.attributes)
            return (found[1],) if found else ()
        return instruction.called if instruction.opcode in ("call", "conditional") else ()

    def _fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """What the instruction runs as a part of itself, a reduction's scalar function left out."""
        if instruction.opcode in ("fusion", "async-start", "custom-call"):
            for name in instruction.called:
                for inner in self._module.computations[name].values():
                    yield inner
                    yield from self._fused(inner)

    def _kernel(self, instruction: Instruction) -> Kernel:
        stated = _STATED.search(instruction.attributes)
        numbers = {key: int(n) for key, n in _NUMBER.findall(stated[1])} if stated else {}
        operands, said = self._module.operands(instruction), _SAID.search(instruction.attributes)
        return Kernel(
            name=instruction.name,
            operands=tuple(shape for operand in operands for shape in operand.shapes),
            results=instruction.shapes,
            flops=numbers.get("flops"),
            bytes_accessed=numbers.get("bytes_accessed"),
            said=said[1].replace("\\", "") if said else "",
        )
