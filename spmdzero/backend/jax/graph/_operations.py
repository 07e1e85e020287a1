"""The operations of nodes: torch's, from the table, and the mesh's own."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.jax.lazy._values import Space
from spmdzero.backend.jax.ops import default_dtype_is, lowering


def spec_in_jax(spec: Sequence[Any]) -> PartitionSpec:
    """JAX's spec, without the last dims if nothing splits them, as its programs return it.

    Of two equal shardings that are written differently each would have a program of its own.
    """
    used = max((dim for dim, axes in enumerate(spec, 1) if axes is not None), default=0)
    return PartitionSpec(*spec[:used])


@dataclasses.dataclass(frozen=True)
class AtenOp:
    """One of torch's operations.

    Attributes:
        name: of the operation and its overload.
        function: computes it with JAX.
        default: torch's default dtype at the time of recording, which numbers take.
        makes: see `Op`.
    """

    name: str
    function: Callable[..., Any]
    default: torch.dtype = torch.float32
    makes: Space | None = None

    @staticmethod
    def of(func: Any) -> "AtenOp | None":
        """The operation under torch's present settings; None if the table has no entry."""
        return _of(func, torch.get_default_dtype())

    @functools.cached_property
    def key(self) -> str:
        """The name, and other settings on which the result depends."""
        return self.name if self.default == torch.float32 else f"{self.name} of {self.default}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results as traced JAX arrays."""
        with default_dtype_is(self.default):
            return self.function(*args, **kwargs)


@functools.cache
def _of(func: Any, default: torch.dtype) -> AtenOp | None:
    function = lowering(func)
    return None if function is None else AtenOp(str(func), function, default)


@dataclasses.dataclass(frozen=True)
class MeshOp:
    """An operation of the mesh.

    Attributes:
        key: its name, and what distinguishes it from others of that name.
        function: computes it on arrays; None for an operation that crosses the region's border.
        makes: see `Op`.
        spec: how the global tensor is split, for an operation that marks or crosses.
        mesh: over which it is split.
        memory: kind of the memory that it marks a value to be in; None for the devices' own.
    """

    key: Any
    function: Callable[..., Any] | None = None
    makes: Space | None = None
    spec: tuple[Any, ...] | None = None
    mesh: Any = None
    memory: str | None = None

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """JAX's sharding for `spec`."""
        assert self.spec is not None
        return NamedSharding(self.mesh, spec_in_jax(self.spec), memory_kind=self.memory)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results as traced JAX arrays."""
        assert self.function is not None
        return self.function(*args, **kwargs)


KEEP_ON_HOST = "keep on the host"
"""In the key of an operation whose result is in the host's memory."""
FETCH = "fetch"
"""In the key of an operation that takes what is in the host's memory as it is."""

identity = MeshOp(("identity",), lambda x: x)
