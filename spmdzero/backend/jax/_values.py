"""What a lazy tensor stands for: an array on the devices, or the result of an operation."""

import dataclasses
import enum
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from spmdzero._user_line import user_place
from spmdzero.backend.jax._trees import found


class Space(enum.IntEnum):
    """Where a value lives: it decides where an operation of it is computed.

    A neutral value is computed from nothing, such as `torch.arange`, and is the same anywhere. A
    host's is another on each host, as the rows that it has loaded, and so is what is computed from
    it; of one process there is none. A replica's is another on each device.
    """

    NEUTRAL = 0
    GLOBAL = 1
    HOST = 2
    REPLICA = 3


class Op(Protocol):
    """What a node does."""

    @property
    def key(self) -> Any:
        """Tells operations apart in the key of a program; everything but values is in it."""

    @property
    def makes(self) -> Space | None:
        """The space of its results; None for that of its inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, of arrays that JAX traces."""


_serial = itertools.count(1)


class Value:
    """One result of a node, an array on the devices, or an input of what is being traced.

    Attributes:
        shape, dtype: of the tensor; in replica space of one replica's, in host space of one host's.
        space: where it lives.
        node, index: what makes it, None once it is computed.
        array: what the devices hold, None until then. A replica's has a leading dim of all devices,
            a host's is as `_own` says. Of a placeholder shape, dtype and sharding only.
        stand_in: whether it is an input without data; what is computed from one has it too.
        serial: later values have higher ones.
        holders: live tensors' cells that hold it.
        uploaded: whether it came from the host as a constant.
        failed: whether JAX couldn't lower what makes it.
        on_demand: whether it waits until somebody asks for it, where others are computed with the
            next program.
        replaces: serial of the computed value whose place in a tensor it takes; 0 for none.
    """

    __slots__ = (
        "__weakref__", "array", "dtype", "failed", "holders", "index", "node", "on_demand",
        "replaces", "serial", "shape", "space", "stand_in", "uploaded",
    )  # fmt: skip

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        space: Space,
        *,
        node: "Node | None" = None,
        index: int = 0,
        array: Any = None,
        stand_in: bool = False,
    ) -> None:
        self.shape, self.dtype, self.space = tuple(shape), dtype, space
        self.node, self.index, self.array = node, index, array
        self.stand_in, self.serial = stand_in, next(_serial)
        self.holders, self.uploaded, self.failed, self.replaces = 0, False, False, 0
        self.on_demand = False

    @property
    def pending(self) -> bool:
        """Whether it is the result of operations that have not been started."""
        return self.node is not None

    def take_place_of(self, old: "Value") -> None:
        """Notes that a tensor holds this instead of `old`, and so whose memory would suit it."""
        if self is not old:
            self.replaces = old.replaces if old.pending else old.serial


def latest_serial() -> int:
    """The serial of a value that would be made now."""
    return next(_serial)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An operation that has not been started.

    Attributes:
        op: what it does.
        args, kwargs: its inputs, values among them, in lists and tuples too.
        values: what is among them, in order.
        space: where it is computed.
        scope: the names around it, outermost first.
        place: file and line of the user's code that asked for it.
        outputs: its results.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    values: tuple[Value, ...]
    space: Space
    scope: tuple[str, ...] = ()
    place: tuple[str, int] | None = None
    outputs: tuple[Value, ...] = ()


class _Here(threading.local):
    """What is around the operations of a thread.

    Attributes:
        scopes: the names, outermost first.
        operation: the outermost torch operation, None outside of any.
    """

    def __init__(self) -> None:
        self.scopes: list[str] = []
        self.operation: Any = None


_here = _Here()


@dataclasses.dataclass
class Scoped:
    """A context in which nodes carry a name."""

    name: str

    def __enter__(self) -> None:
        _here.scopes.append(self.name)

    def __exit__(self, *_: object) -> None:
        _here.scopes.pop()


class Operation:
    """A context in which nodes carry the name of a torch operation, as torch_xla writes it.

    Of what one operation is taken apart into that one's name stays.
    """

    def __init__(self, func: Any) -> None:
        self._func = func

    def __enter__(self) -> None:
        self._outermost = _here.operation is None
        if self._outermost:
            _here.operation = self._func
            _here.scopes.append(self._func._schema.name.replace("::", "__"))

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _here.operation = None
            _here.scopes.pop()


def record(
    op: Op,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    forms: Sequence[tuple[Sequence[int], torch.dtype]],
) -> tuple[Value, ...]:
    """Notes an operation.

    Args:
        op: what it does.
        args, kwargs: its inputs; values stand for tensors.
        forms: shape and dtype of each result.
    """
    values = (*found(args, Value), *found(dict(kwargs), Value))
    space = op.makes
    if space is None:
        space = max((value.space for value in values), default=Space.NEUTRAL)
    node = Node(op, args, kwargs, values, space, tuple(_here.scopes), user_place())
    stand_in = any(value.stand_in for value in values)
    node.outputs = tuple(
        [
            Value(shape, dtype, space, node=node, index=index, stand_in=stand_in)
            for index, (shape, dtype) in enumerate(forms)
        ]
    )
    return node.outputs
