"""What nodes do: torch's operations by the table, and the mesh's own."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.jax._values import Space
from spmdzero.backend.jax.ops import default_dtype_is, lowering


@dataclasses.dataclass(frozen=True)
class AtenOp:
    """One of torch's operations.

    Attributes:
        name: its name and overload.
        function: computes it with JAX.
        default: torch's default dtype when it is recorded, which says what numbers become.
        makes: see `Op`.
    """

    name: str
    function: Callable[..., Any]
    default: torch.dtype = torch.float32
    makes: Space | None = None

    @staticmethod
    def of(func: Any) -> "AtenOp | None":
        """The operation as torch's settings are now, None where the table has no entry."""
        return _of(func, torch.get_default_dtype())

    @functools.cached_property
    def key(self) -> str:
        """Its name, and what else decides what it makes of the same inputs."""
        return self.name if self.default == torch.float32 else f"{self.name} of {self.default}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results, of arrays that JAX traces."""
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


KEEP_ON_HOST = "keep on the host"
"""In the key of an operation whose result is in the host's memory."""

identity = MeshOp(("identity",), lambda x: x)
