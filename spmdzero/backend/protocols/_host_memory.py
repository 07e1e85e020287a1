"""The memory of the hosts, as programs of the devices use it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from spmdzero.backend.protocols._mesh import Mesh, PartitionSpec


class HostMemory(Protocol):
    """Tensors that rest in the host's memory, and values that a program keeps there.

    For tensors that rest there between programs `Runtime.host_memory` says whether programs can.
    """

    def keep(self, mesh: Mesh, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """Has `tensor` rest in the host's memory from now on: what is committed to it does.

        Any operation may read it.
        """

    def fetch(
        self,
        mesh: Mesh,
        tensors: Sequence[torch.Tensor],
        specs: Sequence[PartitionSpec],
        *,
        after: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """Copies in the devices' memory, which leave the host's once `after` is computed.

        Args:
            mesh: the devices.
            tensors: tensors that may rest in the host's memory.
            specs: how each is split.
            after: what is computed before, so that not everything is on the devices at once.
        """

    def missing(self) -> str:
        """Why the traced program moves nothing to the host's memory, ``""`` where it does."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of `tensor` in host memory, for `from_host` only; autograd records nothing."""

    def from_host(self, tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The value that `to_host` was given, copied to the devices once `after` is computed."""
