"""What a backend puts around a forward and around its backward, and where its operations differ."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from spmdzero.backend.protocols._region import AttentionCall
from spmdzero.backend.replica._gathered import GatheredAtUse
from spmdzero.backend.replica._random import ReplicaRandom
from spmdzero.errors import ReplicaRegionError

Upload = Callable[[torch.Tensor], torch.Tensor]


class FollowError(ReplicaRegionError):
    """A value that a loop leaves no trace of is asked for: the forward runs again, without."""


class Quirks(Protocol):
    """Where a backend's operations differ from torch's; of those that a dispatch mode sees."""

    def unsupported(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """Why `func` can't be computed of these, None where it can."""

    def batch_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a BatchNorm returns; its running statistics become torch's."""

    def made(self, result: Any) -> Any:
        """What was made of no tensor, so that writes through its views reach it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provided:
    """What a forward in the region runs on.

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
    """What a backend puts around the module.

    Attributes:
        attention: how the latest forward computes attention; empty where it has no kernels.
    """

    attention: tuple[AttentionCall, ...]

    @property
    def quirks(self) -> Quirks:
        """Where its operations differ from torch's."""

    def forward(
        self, provided: Provided, *, loops: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Around a forward in the region.

        Args:
            provided: what it runs on.
            loops: whether equal blocks may become loops. What they make may raise FollowError.
        """

    def global_forward(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward in global space."""

    def finish(self, output: Any) -> Any:
        """What the module returned, as tensors that can be computed with."""

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Around the backward of a forward in the region."""

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a value is the same at the next step, as far as is known."""
