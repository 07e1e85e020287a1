"""What nodes do: torch's operations by the table, and the mesh's own."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.jax._values import Space
from spmdzero.backend.jax.ops import lowering


@dataclasses.dataclass(frozen=True)
class AtenOp:
    """One of torch's operations.

    Attributes:
        key: its name and overload.
        function: computes it with JAX.
        makes: see `Op`.
    """

    key: str
    function: Callable[..., Any]
    makes: Space | None = None

    @classmethod
    @functools.cache
    def of(cls, func: Any) -> "AtenOp | None":
        """The operation, None where the table has no entry."""
        function = lowering(func)
        return None if function is None else cls(str(func), function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, of arrays that JAX traces."""
        return self.function(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class MeshOp:
    """An operation of the mesh.

    Attributes:
        key: its name and what sets it apart.
        function: computes it of arrays, None for one that crosses the region's border.
        makes: see `Op`.
        spec: how the global side is split, of one that marks or crosses.
        mesh: over which.
    """

    key: Any
    function: Callable[..., Any] | None = None
    makes: Space | None = None
    spec: tuple[Any, ...] | None = None
    mesh: Any = None

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """How JAX says `spec`."""
        assert self.spec is not None
        return NamedSharding(self.mesh, PartitionSpec(*self.spec))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, of arrays that JAX traces."""
        assert self.function is not None
        return self.function(*args, **kwargs)


identity = MeshOp(("identity",), lambda x: x)
