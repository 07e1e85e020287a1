"""The collectives of a compiled program: the bytes and distance of each, and its tensor."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spmdzero._names import in_common
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.hlo._groups import group_size, sent_by_a_host, within
from spmdzero.hlo._loops import runs
from spmdzero.hlo._module import Instruction, Module, Shape
from spmdzero.hlo._tags import ELEMENTWISE, gradient_by_use, tag_of, traced_as

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


_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
# Where rows don't fill the chips' tiles libtpu pads a reduce-scatter, and shifts rows afterwards.
_OF_A_SUM = ("all-reduce", "reduce-scatter", "collective-permute")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One tensor that crosses devices in the compiled step.

    Attributes:
        kind: ``all-reduce``, ``reduce-scatter``, ``all-gather``, ``all-to-all`` or
            ``collective-permute``. libtpu's ``all-reduce-scatter`` fusion is a reduce-scatter.
        dtype: element type as HLO spells it. XLA's CPU compiler widens bf16 collectives to f32.
        shape: shape on one device of the unsharded side: the input of an all-reduce, a
            reduce-scatter, an all-to-all or a permute, the output of an all-gather.
        bytes: size of that shape, bytes per device.
        wire_bytes: what one device sends in a ring of N, rounded down, bytes per device:
            ``bytes`` times 2(N-1)/N for an all-reduce, 1 for a permute, (N-1)/N for the others.
        host_bytes: what one host sends to others, bytes per host, where a ring leaves each host
            once; 0 on one host.
        group_size: N, the number of devices that take part together.
        scattered: whether each device keeps only its part of the sum, as in a reduce-scatter, or an
            all-reduce that is read only through the slice that the device's own index selects.
        asynchronous: whether the compiler split it into a start and an end, with other work
            between.
        in_loop: whether it runs once per turn of a while loop; the bytes are those of one turn.
        turns: number of times that one run of the program runs it; 1 outside of loops.
        role: the tag's role (``gradient``, ``parameter``, ``loss``, ``norm``, ``direction``,
            ``update``); without a tag ``tensor`` or ``sequence`` among the devices of the mesh axis
            of that name, which share a replica's work, else "". So it is, with a tag, for the
            replica's gradient that devices of ``sequence`` add up.
        tensor: the tag's tensor, "" if the tag has none.
        op_name: ``metadata={op_name=...}`` of the instruction.
        source: ``file:line`` that traced it, "" if the metadata doesn't tell.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    wire_bytes: int
    host_bytes: int
    group_size: int
    scattered: bool
    asynchronous: bool
    in_loop: bool
    turns: int
    role: str
    tensor: str
    op_name: str
    source: str

    @property
    def is_scalar(self) -> bool:
        """Whether the collective moves a single element."""
        return math.prod(self.shape) == 1

    @property
    def kind_and_slice(self) -> str:
        """The kind; ``all-reduce + slice`` if each device keeps its part of an all-reduce."""
        return "all-reduce + slice" if self.scattered and self.kind == "all-reduce" else self.kind


def read_collectives(
    module: Module,
    *,
    outputs: Sequence[str] = (),
    hosts: int = 1,
    tensor: int = 1,
    sequence: int = 1,
) -> Iterator[tuple[Instruction, Collective]]:
    """Each collective in the text's order; a combined one has an entry for each of its tensors.

    Args:
        module: an optimised and partitioned module.
        outputs: the program's outputs in order, such as ``"parameter/wte.weight"``: they identify
            collectives for which the compiler kept no name.
        hosts: number of hosts, over which the devices are spread evenly, host after host.
        tensor, sequence: sizes of the mesh axes of those names, the last of a mesh, along which
            devices share a replica's work.

    Raises:
        SpmdZeroUsageError: the text does not say how many devices a collective spans.
    """
    ends = _ends_of_chains(module)
    for instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind in _KINDS and not _goes_on(module, instruction):
            shared = ""
            if tensor > 1 and within(module, instruction, tensor):
                shared = "tensor"
            elif sequence > 1 and within(module, instruction, tensor * sequence):
                shared = "sequence"
            for found in _of_each_operand(module, instruction, outputs, ends, hosts):
                # What devices add up that share rows is one replica's gradient, of which they keep
                # parts.
                own = shared == "sequence" and found.role == "gradient"
                yield instruction, replace(found, role=shared if own else found.role or shared)


def _goes_on(module: Module, instruction: Instruction) -> bool:
    """Whether `instruction` is a later part of a transfer that another one starts.

    Where libtpu fuses a transfer with the compute that hides it, the text repeats the collective in
    the fusion that starts it, in each fusion that computes meanwhile, and in the one that ends it.
    """
    return bool(instruction.chain) and not module.starts_chain(instruction)


def _ends_of_chains(module: Module) -> dict[str, Instruction]:
    """Maps the chain of a transfer that libtpu fuses with other work to the fusion that ends it."""
    ends: dict[str, Instruction] = {}
    for instruction in module.instructions():
        if 'custom_call_target="AsyncCollectiveDone"' in instruction.attributes:
            for part in module.computations[instruction.computation].values():
                if part.chain:
                    ends[part.chain] = module.callers(part.computation)[0]
    return ends


def _of_each_operand(
    module: Module,
    instruction: Instruction,
    outputs: Sequence[str],
    ends: Mapping[str, Instruction],
    hosts: int,
) -> Iterator[Collective]:
    kind = instruction.opcode.removesuffix("-start")
    # libtpu prints a reduce-scatter as a fusion that calls %all-reduce-scatter.<number>.
    fused = instruction.computation.startswith("all-reduce-scatter")
    size = group_size(module, instruction)
    operands = module.operands(instruction)
    if in_parts := kind == "all-to-all" and len(operands) > 1:
        # One operand for each device that it goes to.
        operands = operands[:1]
    # The last fusion of a chain has the result, and the name under which it was traced.
    held = instruction
    if module.starts_chain(instruction):
        held = ends.get(instruction.chain, instruction)
    for index, operand in enumerate(operands):
        element = index if len(operands) > 1 else None
        payload = operand.shapes[0]
        if kind == "all-gather":
            payload = _gathered(payload, instruction, size)
        if in_parts:
            payload = Shape(payload.dtype, (size, *payload.dims))
        scattered = fused or kind == "reduce-scatter"
        if kind == "all-reduce" and not scattered:
            scattered = _only_own_part(module, instruction, element)
        shown = "reduce-scatter" if fused else kind
        traced = traced_as(module, held, element)
        role, tensor = tag_of(module, held, traced, operand, element, outputs)
        if not traced.op_name and kind == "all-gather":
            # In programs over several slices libtpu keeps no names of collectives.
            of_input, _, name = moved_from(module, operand, outputs).partition("/")
            role, tensor = (of_input, name) if of_input == "parameter" else (role, tensor)
        if not traced.op_name and kind in _OF_A_SUM and math.prod(payload.dims) > 1:
            role, tensor = gradient_by_use(module, held, element) or (role, tensor)
            # A micro-batch's gradients leave the program as the accumulators to which they are
            # added.
            role = "gradient" if role == "accumulator" else role
        wire = _wire_bytes(shown, payload.bytes, size)
        yield Collective(
            kind=shown,
            dtype=payload.dtype,
            shape=payload.dims,
            bytes=payload.bytes,
            wire_bytes=wire,
            host_bytes=sent_by_a_host(
                module, instruction, kind=shown, payload=payload.bytes, wire=wire, hosts=hosts
            ),
            group_size=size,
            scattered=scattered,
            asynchronous=module.asynchronous(instruction),
            in_loop=module.in_loop(instruction.computation),
            turns=runs(module, instruction.computation),
            role=role,
            tensor=tensor,
            op_name=traced.op_name,
            source=traced.source,
        )


def _wire_bytes(kind: str, payload: int, size: int) -> int:
    if kind == "collective-permute":
        return payload
    return payload * (size - 1) * (2 if kind == "all-reduce" else 1) // size


def _gathered(shard: Shape, instruction: Instruction, size: int) -> Shape:
    found = re.search(r"\bdimensions=\{(\d+)\}", instruction.attributes)
    if found is None:
        raise SpmdZeroUsageError(f"the all-gather %{instruction.name} does not say its dimension.")
    dim = int(found[1])
    return Shape(shard.dtype, (*shard.dims[:dim], shard.dims[dim] * size, *shard.dims[dim + 1 :]))


def _only_own_part(module: Module, instruction: Instruction, element: int | None) -> bool:
    """Whether a sum is read only through slices that start at this device's own index."""
    sliced = False
    for use in module.uses(instruction, element):
        if use.user is None:
            return False
        if use.user.opcode == "dynamic-slice" and use.position == 0:
            if not _from_device_index(module, use.user):
                return False
        elif use.user.opcode not in ELEMENTWISE or not _only_own_part(module, use.user, None):
            return False
        sliced = True
    return sliced


def _from_device_index(module: Module, dynamic_slice: Instruction) -> bool:
    pending, seen = list(module.operands(dynamic_slice)[1:]), set()
    while pending:
        instruction = pending.pop()
        if instruction.opcode in ("partition-id", "replica-id"):
            return True
        key = instruction.computation, instruction.name
        if key not in seen:
            seen.add(key)
            pending += module.sources(instruction)
    return False
