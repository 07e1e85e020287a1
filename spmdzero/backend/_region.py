"""The replica region: a module's forward and backward run per device."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from spmdzero.errors import SpmdZeroUsageError

OutputRule = Literal["batch", "mean", "sum", "agree", "stack"]
# Parameter name, and one replica's gradient in replica space; several for one name are summed.
GradientSink = Callable[[str, torch.Tensor], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionRules:
    """What may not be guessed about a module's inputs and outputs.

    Attributes:
        batch_dim: the dim of the batch for inputs and outputs alike; 0 unless declared.
        input_batch_dims: input name -> its own batch dim.
        outputs: dotted path of an output -> how it leaves.
    """

    batch_dim: int = 0
    input_batch_dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, OutputRule] = dataclasses.field(default_factory=dict)


class Forward(Protocol):
    """Calls a module on global tensors."""

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns, in global space; a `Batch` enters as shards.

        Raises:
            ReplicaRegionError: the module does what can't be done per replica.
        """


@runtime_checkable
class Region(Forward, Protocol):
    """Calls a module once per device, each on its own rows."""

    @property
    def recomputes(self) -> bool:
        """Whether the latest forward checkpoints activations."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward pass is to come that runs parts of the latest forward again."""

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Wraps `loss.backward()`: gradient checkpointing runs the module's forward again there."""

    def check_agreement(self) -> None:
        """Reads whether integer outputs and buffers were the same on every replica so far.

        Raises:
            ReplicaRegionError: one was not; names it.
        """


def refuse_gradient_hooks(name: str, parameter: torch.Tensor) -> None:
    """Raises SpmdZeroUsageError when `parameter` has gradient hooks, which would never run."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise SpmdZeroUsageError(
            f"{name} has a gradient hook, which would never run: gradients leave the replica "
            "region on their way to sharded accumulators. Put the change into the loss, or into "
            "the config (gradient_clipping)"
        )
