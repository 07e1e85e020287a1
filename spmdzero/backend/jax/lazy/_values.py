"""Values of lazy tensors: arrays on the devices, or results of recorded operations."""

import dataclasses
import enum
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from spmdzero._user_line import user_place
from spmdzero.backend.forms._tree import found


class Space(enum.IntEnum):
    """The space of a value, which decides where operations on it are computed.

    A neutral value is computed from nothing, as `torch.arange`, and is the same everywhere. A host
    value differs from host to host, as the rows that a host has loaded and all that is computed
    from them; a single process has none. A replica value differs from device to device.
    """

    NEUTRAL = 0
    GLOBAL = 1
    HOST = 2
    REPLICA = 3


class Op(Protocol):
    """The operation of a node."""

    @property
    def key(self) -> Any:
        """Identifies the operation in a program's key; it includes everything but values."""

    @property
    def makes(self) -> Space | None:
        """The space of the results; None for that of the inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results as traced JAX arrays."""


_serial = itertools.count(1)


class Value:
    """A result of a node, an array on the devices, or an input of a trace.

    Attributes:
        shape, dtype: of the tensor; in replica space those of one replica, in host space of one
            host.
        space: decides where operations on it are computed.
        node, index: the node that makes it, and which of its results; None once it is computed.
        array: the array on the devices, None until it is computed. A replica's has a leading dim of
            all replicas, a host's is as in `_own`. A placeholder's has only shape, dtype and
            sharding.
        stand_in: whether it is an input without data, or computed from one.
        serial: increases from value to value.
        holders: number of live tensors' cells that hold it.
        uploaded: whether it came from the host as a constant.
        failed: whether JAX couldn't lower its operation.
        on_demand: whether it is computed only when it is asked for, not with the next program.
        form: shape, dtype and sharding of a computed value, once somebody has asked for them.
        replaces: serial of the computed value that it replaces in a tensor; 0 for none.
        lasts: whether something that is computed on demand reads it.
        common: whether each replica and host has the same, as far as it was known when it was
            computed.
    """

    __slots__ = (
        "__weakref__", "array", "common", "dtype", "failed", "form", "holders", "index", "lasts",
        "node", "on_demand", "replaces", "serial", "shape", "space", "stand_in", "uploaded",
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
        self.on_demand = self.lasts = False
        self.common = space in (Space.NEUTRAL, Space.GLOBAL)
        self.form: tuple[tuple[int, ...], torch.dtype, str] | None = None

    @property
    def sharding(self) -> Any:
        """JAX's sharding of a computed value, None before it is computed."""
        array = self.array
        return None if array is None else array.sharding

    @property
    def pending(self) -> bool:
        """Whether the value is the result of operations that have not been started."""
        return self.node is not None

    def renew(self, array: Any) -> None:
        """Becomes another value of the same form, for a tensor that alone holds this one."""
        self.array, self.serial = array, next(_serial)
        self.space, self.uploaded, self.common = Space.GLOBAL, False, True

    def take_place_of(self, old: "Value") -> None:
        """Records that a tensor holds this value after `old`, whose memory suits it."""
        if self is not old:
            self.replaces = old.serial if old.node is None else old.replaces


def latest_serial() -> int:
    """The serial of a value that is made now."""
    return next(_serial)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An operation that has not been started.

    Attributes:
        op: the operation.
        args, kwargs: its arguments; values may stand in lists and tuples.
        values: the values among them, in order.
        space: where it is computed.
        scope: the names around it, outermost first.
        place: file and line of the user's code.
        forms: shape and dtype of each result. The results themselves know the node: if it knew
            them, they and its inputs would stay until Python looks for cycles.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    values: tuple[Value, ...]
    space: Space
    scope: tuple[str, ...] = ()
    place: tuple[str, int] | None = None
    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()


class _Here(threading.local):
    """The surroundings of a thread's operations.

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

    Operations of a decomposition keep the name of the decomposed one.
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
    *,
    values: tuple[Value, ...] | None = None,
) -> tuple[Value, ...]:
    """Records an operation.

    Args:
        op: the operation.
        args, kwargs: its arguments; values stand for tensors.
        forms: shape and dtype of each result.
        values: those among the arguments, if the caller knows them.
    """
    values = (*found(args, Value), *found(dict(kwargs), Value)) if values is None else values
    space = op.makes
    if space is None:
        space = max((value.space for value in values), default=Space.NEUTRAL)
    made = tuple([(tuple(shape), dtype) for shape, dtype in forms])
    node = Node(op, args, kwargs, values, space, tuple(_here.scopes), user_place(), made)
    stand_in = bool([value for value in values if value.stand_in])
    return tuple(
        [
            Value(shape, dtype, space, node=node, index=index, stand_in=stand_in)
            for index, (shape, dtype) in enumerate(made)
        ]
    )
