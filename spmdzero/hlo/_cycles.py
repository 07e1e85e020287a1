"""The operations of a compiled program in the order in which they run, and their costs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdzero.hlo._collectives import read_collectives
from spmdzero.hlo._loops import turns
from spmdzero.hlo._module import Instruction, Module, Shape
from spmdzero.hlo._text import parse

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
# Pallas writes the author's own cost into the call's configuration, with numbers as in JSON.
_STATED = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_SAID = re.compile(r"kernel_metadata=\{(.*?)\}\}")
_NUMBER = re.compile(r'"(\w+)":\s*"?(-?\d+)')
_CHAIN_START, _CHAIN_END = (f'custom_call_target="AsyncCollective{x}"' for x in ("Start", "Done"))
# A dot's batch dims. libtpu spells them as a window of as many places, in which all but one are
# zeros.
_BATCH = re.compile(r"\blhs_batch_dims=\{\d|\bwindow=\{size=(\d+)\b[^}]*\blhs_dilate=\1\b")
_PRODUCTS = frozenset({"dot", "convolution"})
_COPIES = frozenset({"copy", "copy-start"})
_SLICES = frozenset(
    f"dynamic-{way}{start}" for way in ("slice", "update-slice") for start in ("", "-start")
)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A Pallas kernel: code that the TPU's compiler takes as it is, without an estimate.

    Attributes:
        name: the name of its call, which begins with the kernel's.
        operands: the arrays that one call reads, shapes on one device.
        results: the arrays that one call writes.
        flops: the author's number of operations of one call; None if he gave none.
        bytes_accessed: the author's number of bytes that one call reads and writes, or None.
        said: the author's notes, such as sizes of blocks, as JSON.
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
        name: of the operation in the text.
        opcode: as HLO spells it.
        op_names: its own ``op_name``, then those of the operations fused into it, then those of the
            loops and calls around it, the innermost first.
        opcodes: its own opcode and those of the operations fused into it.
        products: the ``op_name`` of each dot and convolution among these.
        batched: whether one of them multiplies a batch of matrices, each with its own.
        source: ``file:line`` that traced it, "" if the text doesn't tell.
        cycles: the compiler's estimate for one run; None if it wrote none.
        wire_bytes: bytes that one device sends in one run, as in `Collective`.
        from_host, to_host: bytes that one run copies from the host's memory to the device's, and
            the other way.
        kernel: the kernel that it calls, None if it calls none.
        asynchronous: whether it only starts a transfer, which another operation `ends`.
        ends: name of the operation whose transfer it waits for; "" if it waits for none.
        bodies: the operations that take its time: a loop's body, or each branch of a condition.
        trips: how often the bodies run in one run of it; 1 for a loop of unknown length.
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
    from_host: int
    to_host: int
    kernel: Kernel | None
    asynchronous: bool
    ends: str
    bodies: tuple[tuple["Operation", ...], ...]
    trips: int


def read_schedule(hlo: str) -> tuple[Operation, ...]:
    """The operations of an optimised program's entry computation, in the order in which they run.

    libtpu estimates the cycles of its own code, as ``estimated_cycles`` in the text. They
    include memory's time, but neither kernels nor collectives. XLA's CPU compiler estimates none.

    Raises:
        SpmdZeroUsageError: the text is not a whole HLO module, or doesn't say how many devices a
            collective spans.
    """
    module = parse(hlo)
    wire: dict[tuple[str, str], int] = {}
    for instruction, collective in read_collectives(module):
        wire[instruction.key] = wire.get(instruction.key, 0) + collective.wire_bytes
    return _Schedule(module, wire).of(module.entry)


def each_operation(
    schedule: Sequence[Operation], *, runs: int = 1
) -> Iterator[tuple[Operation, int]]:
    """Each operation that takes time itself, and how often it runs in one run of the program."""
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
        """The operations of one computation; `around` has the names of the operations around it."""
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
        from_host, to_host = self._across_the_link(instruction)
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
            from_host=from_host,
            to_host=to_host,
            kernel=self._kernel(instruction) if _KERNEL in instruction.attributes else None,
            asynchronous=asynchronous,
            ends=ends,
            bodies=tuple(self.of(name, (instruction.op_name, *around)) for name in entered),
            trips=turns(self._module, instruction) if instruction.opcode == "while" else 1,
        )

    def _across_the_link(self, instruction: Instruction) -> tuple[int, int]:
        """Bytes that a copy brings from the host's memory, and to it, of a loop's stack too."""
        if instruction.opcode in _SLICES:
            stack, *rest = self._module.operands(instruction)
            if not stack.shapes[0].on_host:
                return 0, 0
            if instruction.opcode.startswith("dynamic-update-slice"):
                return 0, rest[0].shapes[0].bytes
            # Of a start's results the slice is the one before the last.
            return instruction.shapes[0 if len(instruction.shapes) == 1 else -2].bytes, 0
        if instruction.opcode not in _COPIES:
            return 0, 0
        # Of a start's results the copy is the first.
        made, (copied,) = instruction.shapes[0], self._module.operands(instruction)
        if made.on_host == copied.shapes[0].on_host:
            return 0, 0
        return (0, made.bytes) if made.on_host else (made.bytes, 0)

    def _transfer(self, instruction: Instruction, fused: list[Instruction]) -> tuple[bool, str]:
        """Whether an operation only starts a transfer, and the start that it waits for."""
        if instruction.opcode.endswith("-start"):
            return True, ""
        if instruction.opcode.endswith("-done"):
            return False, instruction.operands[0]
        chains = [part.chain for part in fused if part.chain]
        starts = any(_CHAIN_START in part.attributes for part in fused)
        if starts:
            self._started |= dict.fromkeys(chains, instruction.name)
        ended = any(_CHAIN_END in part.attributes for part in fused)
        ends = next((self._started[c] for c in chains if c in self._started), "")
        return starts, ends if ended else ""

    def _entered(self, instruction: Instruction) -> tuple[str, ...]:
        """The computations whose operations take the instruction's time."""
        if instruction.opcode == "while":
            found = re.search(r"\bbody=%([\w.\-]+)", instruction.attributes)
            return (found[1],) if found else ()
        return instruction.called if instruction.opcode in ("call", "conditional") else ()

    def _fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions that run as a part of this one, without the function of a reduction."""
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
