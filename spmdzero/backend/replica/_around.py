"""Protocols of a backend's contexts around a forward and a backward, and of its quirks."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from spmdzero.backend.protocols._region import AttentionCall
from spmdzero.backend.replica._gathered import GatheredAtUse
from spmdzero.backend.replica._random import ReplicaRandom
from spmdzero.backend.replica._recomputed_blocks import RecomputedBlocks
from spmdzero.errors import ReplicaRegionError

Upload = Callable[[torch.Tensor], torch.Tensor]


class FollowError(ReplicaRegionError):
    """A value was asked for that a loop doesn't return: the forward runs again, without loops."""


class Quirks(Protocol):
    """Differences between a backend's operations and torch's, as a dispatch mode sees them."""

    def unsupported(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """The reason why `func` can't run on these arguments, None where it can."""

    def batch_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a BatchNorm; its running statistics become those that torch computes."""

    def made(self, result: Any) -> Any:
        """The result of a factory, such that writes through its views reach it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provided:
    """Provides what a forward in the region runs on.

    Attributes:
        random: the replicas' random numbers.
        upload: a CPU tensor -> every replica's copy.
        enter_whole: a global tensor -> every replica's copy.
        gathered: gives operations the parameters that rest as shards; None where none does.
    """

    random: ReplicaRandom
    upload: Upload
    enter_whole: Upload
    gathered: GatheredAtUse | None = None


class Around(Protocol):
    """The contexts that a backend puts around the module's forward and backward.

    Attributes:
        attention: how the latest forward computes attention; empty where it has no kernels.
        recomputed: the modules that run again in backward.
        keeps_tensors: whether what a forward leaves in an attribute can be global from then on.
    """

    keeps_tensors: bool
    attention: tuple[AttentionCall, ...]
    recomputed: RecomputedBlocks

    @property
    def quirks(self) -> Quirks:
        """The differences between the backend's operations and torch's."""

    def forward(
        self, provided: Provided, *, loops: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Context around a forward in the region.

        Args:
            provided: the inputs of the forward.
            loops: whether equal blocks may become loops. Their results may raise FollowError.
        """

    def global_forward(self) -> contextlib.AbstractContextManager[None]:
        """Context around a forward in global space."""

    def finish(self, output: Any) -> Any:
        """The module's output, as tensors that can be computed with."""

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Context around the backward of a forward in the region."""

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a value will be the same at the next step, as far as is known."""

    def is_same_everywhere(self, tensor: torch.Tensor) -> bool:
        """Whether a replica's value is known to be that of all, and may outlast its forward."""
