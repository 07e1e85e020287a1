"""An optimised HLO module as a graph: instructions, uses and callers."""

import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{([\d, ]*)\}")
# The same, for an output that is an element of the program's tuple.
_ALIASED_OUTPUT = re.compile(r"\{(\d+)\}: \((\d+), \{[\d, ]*\}")
# Between slices libtpu sends and receives; both ends have one word.
_RENDEZVOUS = re.compile(r'_rendezvous="([^"]*)"')
# In these calls each operand is the value of a parameter, and the called computation's root is the
# value of the call. In a while, a reduce or a sort this doesn't hold.
_TRANSPARENT_CALLS = frozenset({"fusion", "call", "async-start"})

# Instructions between a collective and its readers: the slice of a fused reduce-scatter, the end of
# an async pair, a change of layout.
_HANDS_ON = frozenset({"dynamic-slice", "bitcast", "copy", "async-done"})
_HANDS_ON |= {"all-reduce-done", "all-gather-done", "collective-permute-done"}


@dataclass(frozen=True)
class Shape:
    """One array of HLO.

    Attributes:
        dtype: as HLO spells it (``f32``, ``bf16``, ``pred``).
        dims: its size along each dim.
        on_host: whether it is in the host's memory, ``S(5)`` in a layout; shapes are compared
            without this.
    """

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = field(default=False, compare=False)

    @property
    def bytes(self) -> int:
        """Size in bytes; 4-bit types are packed, tokens and opaque values are empty."""
        if self.dtype == "pred":
            return prod(self.dims)
        width = re.search(r"\d+", self.dtype)
        return prod(self.dims) * int(width[0]) // 8 if width else 0


@dataclass(frozen=True)
class Instruction:
    """One line of HLO; ``shapes`` has one entry, or one for each element of a tuple."""

    name: str
    computation: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def key(self) -> tuple[str, str]:
        """A key that no other instruction of the module has."""
        return self.computation, self.name

    @property
    def op_name(self) -> str:
        """The ``op_name`` of the metadata, or an empty string."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        """The ``file:line`` that traced the instruction, or an empty string."""
        found = _SOURCE.search(self.attributes)
        return f"{found[1]}:{found[2]}" if found else ""

    @property
    def chain(self) -> str:
        """The number of the transfer that libtpu fuses with other work, of which this is a part.

        It is "" for other instructions. Transfers of equal shape share a channel, and have chains
        of their own.
        """
        found = _CHAIN.search(self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls, applies or loops over."""
        names: list[str] = []
        for one, several in _CALLED.findall(self.attributes):
            names += [one] if one else re.findall(r"%([\w.\-]+)", several)
        return tuple(names)

    @property
    def element(self) -> int | None:
        """The index of a get-tuple-element, None for other instructions."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if self.opcode == "get-tuple-element" and found else None


@dataclass(frozen=True)
class Use:
    """A reader of a value, None for the program's output, and the operand that it reads."""

    user: Instruction | None
    position: int


@dataclass(frozen=True)
class Module:
    """One HLO module.

    Attributes:
        header: the line that starts with ``HloModule``.
        entry: name of the entry computation.
        computations: computation name -> instruction name -> instruction, in the text's order.
    """

    header: str
    entry: str
    computations: dict[str, dict[str, Instruction]]

    @property
    def aliased(self) -> int:
        """Number of inputs whose buffer an output reuses (``input_output_alias``)."""
        return len(set(_ALIAS.findall(self.header)))

    @property
    def aliased_outputs(self) -> tuple[int, ...]:
        """Indices of outputs that reuse an input's buffer, in a program that returns a tuple."""
        return tuple(place for place, _ in self.reused)

    @cached_property
    def reused(self) -> tuple[tuple[int, int], ...]:
        """Index of an output and number of the input whose buffer it reuses, as above."""
        found = _ALIASED_OUTPUT.findall(self.header)
        return tuple((int(place), int(number)) for place, number in found)

    @property
    def parameters(self) -> int:
        """Number of inputs of the entry computation."""
        return len(self._parameters[self.entry])

    def instructions(self) -> Iterator[Instruction]:
        """Every instruction, in the text's order."""
        for computation in self.computations.values():
            yield from computation.values()

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions whose values this one reads."""
        siblings = self.computations[instruction.computation]
        return tuple(siblings[name] for name in instruction.operands)

    def callers(self, computation: str) -> tuple[Instruction, ...]:
        """The instructions that call, apply or loop over a computation."""
        return tuple(self._callers.get(computation, ()))

    def sources(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The sources of a value, one step back, seen through the border of a fusion."""
        if instruction.opcode == "parameter":
            index = int(instruction.arguments)
            return tuple(
                self.operands(caller)[index]
                for caller in self.callers(instruction.computation)
                if caller.opcode in _TRANSPARENT_CALLS
            )
        if instruction.opcode == "recv":
            return tuple(self.operands(sent)[0] for sent in self._met(instruction, "send"))
        inside = [self.root(name) for name in self._entered(instruction)]
        return (*inside, *self.operands(instruction))

    def uses(self, instruction: Instruction, element: int | None = None) -> Iterator[Use]:
        """The readers of a value (or a tuple's element), seen through tuples and fusion borders."""
        for user, position in self._users.get(instruction.key, ()):
            if user.opcode == "get-tuple-element":
                if element is None or user.element == element:
                    yield from self.uses(user)
            elif user.opcode == "tuple":
                yield from self.uses(user, position)
            elif user.opcode == "send":
                for received in self._met(user, "recv"):
                    yield from self.uses(received, 0)
            elif entered := self._entered(user):
                for name in entered:
                    yield from self.uses(self._parameters[name][position])
            else:
                yield Use(user, position)
        if not instruction.is_root:
            return
        if instruction.computation == self.entry:
            yield Use(None, element or 0)
        for caller in self.callers(instruction.computation):
            if caller.opcode in _TRANSPARENT_CALLS:
                yield from self.uses(caller, element)
            else:
                yield Use(caller, element or 0)

    def taken_out(self, instruction: Instruction, element: int | None) -> Iterator[Instruction]:
        """The instructions that hand on a value (or one element of a tuple) unchanged or sliced.

        They are get-tuple-elements, and a fusion or async pair with this as its only result. When
        the compiler combines collectives, each of these keeps the metadata of its tensor.
        """
        for user, position in self._users.get(instruction.key, ()):
            if user.opcode == "get-tuple-element":
                if element is None or user.element == element:
                    yield user
                    yield from self.taken_out(user, None)
            elif user.opcode == "tuple":
                yield from self.taken_out(user, position)
            elif user.opcode in _HANDS_ON:
                yield user
                yield from self.taken_out(user, element if user.opcode.endswith("-done") else None)
        if instruction.is_root:
            for caller in self.callers(instruction.computation):
                if caller.opcode in _TRANSPARENT_CALLS:
                    if len(caller.shapes) == 1:
                        yield caller
                    yield from self.taken_out(caller, element)

    def origin(self, value: Instruction, *, through: Collection[str]) -> Iterator[Instruction]:
        """Yields a value; while its opcode is in `through`, continues with its first operand."""
        seen = set[tuple[str, str]]()
        while value.key not in seen:
            seen.add(value.key)
            yield value
            sources = self.sources(value)
            if value.opcode not in through or not sources:
                return
            value = sources[0]

    def readers(
        self, value: Instruction, element: int | None = None, *, through: Collection[str]
    ) -> Iterator[Use]:
        """The uses, and those of the users whose opcode is in `through`, nearest first."""
        pending, seen = deque(self.uses(value, element)), set[tuple[str, str]]()
        while pending:
            use = pending.popleft()
            yield use
            if use.user and use.user.opcode in through and use.user.key not in seen:
                seen.add(use.user.key)
                # What a loop carries comes out of it at the same place.
                place = use.position if use.user.opcode == "while" else None
                pending.extend(self.uses(use.user, place))

    def asynchronous(self, instruction: Instruction) -> bool:
        """Whether other work may run between the start and the end of a collective."""
        return (
            instruction.opcode.endswith("-start")
            or self._is_within(instruction.computation, "async-start")
            or self.starts_chain(instruction)
        )

    def starts_chain(self, instruction: Instruction) -> bool:
        """Whether the instruction starts a transfer that libtpu fuses with other work."""
        return any(
            'custom_call_target="AsyncCollectiveStart"' in user.attributes
            for user, _ in self._users.get(instruction.key, ())
        )

    def in_loop(self, computation: str) -> bool:
        """Whether a computation is a while body or condition, or is called from one."""
        return self._is_within(computation, "while")

    def _is_within(self, computation: str, opcode: str) -> bool:
        return any(
            caller.opcode == opcode or self._is_within(caller.computation, opcode)
            for caller in self.callers(computation)
        )

    def _entered(self, instruction: Instruction) -> tuple[str, ...]:
        return instruction.called if instruction.opcode in _TRANSPARENT_CALLS else ()

    def _met(self, transfer: Instruction, other: str) -> list[Instruction]:
        """The other ends of a transfer between slices: those of a send, or of a recv."""
        ends = self._ends.get(_rendezvous(transfer), [])
        return [end for end in ends if end.opcode == other]

    @cached_property
    def _ends(self) -> dict[str, list[Instruction]]:
        ends: dict[str, list[Instruction]] = {}
        for instruction in self.instructions():
            if instruction.opcode in ("send", "recv") and (word := _rendezvous(instruction)):
                ends.setdefault(word, []).append(instruction)
        return ends

    def root(self, computation: str) -> Instruction:
        """The instruction whose value a computation returns."""
        return next(i for i in self.computations[computation].values() if i.is_root)

    @cached_property
    def _users(self) -> dict[tuple[str, str], list[tuple[Instruction, int]]]:
        users: dict[tuple[str, str], list[tuple[Instruction, int]]] = {}
        for user in self.instructions():
            for position, name in enumerate(user.operands):
                users.setdefault((user.computation, name), []).append((user, position))
        return users

    @cached_property
    def _callers(self) -> dict[str, list[Instruction]]:
        callers: dict[str, list[Instruction]] = {}
        for caller in self.instructions():
            for name in caller.called:
                callers.setdefault(name, []).append(caller)
        return callers

    @cached_property
    def _parameters(self) -> dict[str, dict[int, Instruction]]:
        return {
            name: {int(i.arguments): i for i in body.values() if i.opcode == "parameter"}
            for name, body in self.computations.items()
        }


def _rendezvous(transfer: Instruction) -> str:
    found = _RENDEZVOUS.search(transfer.attributes)
    return found[1] if found else ""
