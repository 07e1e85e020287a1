"""Protocols of a forward, on the whole batch or per device in the replica region."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from typing_extensions import TypeIs

from spmdzero.backend.forms._work import Work
from spmdzero.errors import SpmdZeroUsageError

OutputRule = Literal["batch", "mean", "sum", "agree", "stack"]
AttentionChoice = Literal["auto", "kernel", "plain"]
RecomputePolicy = Literal["nothing", "dots", "everything", "offload"]
# A policy by name has the names of what is kept of a block under "keep", and under "offload".
Policy = RecomputePolicy | Mapping[str, Sequence[str]]
Recompute = Policy | Mapping[str, Policy]
# Names of parameters and buffers that a forward wrote.
Wrote = Callable[[Collection[str]], None]
KeySource = Callable[[int], torch.Tensor]
Reader = Callable[[torch.Tensor], torch.Tensor]


def is_policy(recompute: Recompute) -> TypeIs[Policy]:
    """Whether it is one policy, not one per pattern of module names."""
    return isinstance(recompute, str) or any(
        isinstance(named, Sequence) and not isinstance(named, str) for named in recompute.values()
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowPrecision:
    """Products of linear layers in 8 bits.

    Attributes:
        dtype: of the operands: fp8 is e4m3, and e5m2 for gradients where the recipe is by tensors.
        recipe: what has a scale of its own: each tensor, or each row of what is multiplied.
        skip: names of modules whose layers keep their dtype, with * for anything but a dot; None
            for what a model says in the end, and what chooses experts.
    """

    dtype: Literal["fp8", "int8"]
    recipe: Literal["tensorwise", "rowwise"]
    skip: tuple[str, ...] | None = None


class GradientSink(Protocol):
    """Takes the gradients that a backward finds; several of one parameter are summed."""

    def __call__(self, name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
        """A gradient of the parameter `name`.

        Args:
            grad: one replica's, `[*shape]` in replica space.
            waits: it is in the form in which gradients wait for the step instead, as a loop leaves
                it: see `PartsOfGradients`.
        """


class PartsOfGradients(Protocol):
    """How a loop reduces, in each turn, the gradients of parameters that rest as shards."""

    @property
    def unit(self) -> float:
        """The factor by which the sum over replicas is multiplied on the way."""

    def is_trained(self, name: str) -> bool:
        """Whether the gradient of this parameter is used."""

    def part(self, name: str, local: torch.Tensor, *, shown: str) -> torch.Tensor:
        """Sums `local` over replicas and returns this device's part of it, in replica space.

        Args:
            name: of the parameter.
            local: `[*shape]`, in replica space.
            shown: the name under which the ledger has it.
        """

    def of_part(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The gradient, in the form in which it waits for the step, of the devices' parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionRules:
    """Declarations about a module's inputs and outputs that can't be guessed.

    Attributes:
        batch_dim: the batch dim of inputs and outputs; 0 unless declared.
        input_batch_dims: input name -> its own batch dim.
        outputs: dotted path of an output -> the rule by which it leaves the region.
    """

    batch_dim: int = 0
    input_batch_dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, OutputRule] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of `scaled_dot_product_attention` in a forward whose program may have kernels.

    Attributes:
        where: the line of the model's code, and the submodule.
        plain_because: the reason why no kernel computes it, None where a kernel does.
    """

    where: str
    plain_because: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracing:
    """The tensors and functions that a pass through the region uses instead of the module's own.

    Attributes:
        parameters, buffers: global tensors by name; a parameter requires a gradient as its own
            does.
        sink: takes each parameter's name and gradient in a backward.
        key: maps the value of a random draw's key, drawn on the host, to the key: 0-dim int32,
            global.
        read: called where Python reads a value, unless uploads are recorded and the value is fixed.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    sink: GradientSink
    key: KeySource
    read: Reader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    """The results of a pass through the region, in global space.

    Attributes:
        output: the module's output.
        written: name -> the new value of a parameter or buffer that the module wrote.
        flags: label -> 0-dim int32, 1 where replicas differ in a value that they must share.
        state: name -> the replicas' parameter or buffer, for `Forward.backward`.
    """

    output: Any
    written: Mapping[str, torch.Tensor]
    flags: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


class Forward(Protocol):
    """Calls a module on global tensors.

    Attributes:
        read_at: the line where the latest pass read a value from the devices that may change by the
            next step, None where it read none.
    """

    read_at: str | None

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        """The attention calls of the latest pass; empty where its program has no kernels."""

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's output in global space; a `Batch` among the inputs enters as shards.

        Raises:
            ReplicaRegionError: the module does what can't be done per replica.
        """

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Tracing) -> Passage:
        """Runs the module as a call does, but reads and writes nothing that the module holds."""

    def note_folded(self) -> None:
        """Records that the latest forward was one operation, which backward doesn't recompute."""

    def settle(
        self, *, written: Mapping[str, torch.Tensor], flags: Mapping[str, torch.Tensor]
    ) -> None:
        """Writes the new values of a `Passage` to the module, and remembers its flags."""

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
        """The arithmetic of a call and of its backward, by which nothing is computed or changed.

        Raises:
            ReplicaRegionError: as in a call.
        """

    def backward(
        self, state: Mapping[str, torch.Tensor], *, key: KeySource, read: Reader | None
    ) -> contextlib.AbstractContextManager[None]:
        """Context for the backward pass of the output of `trace`.

        Args:
            state: of the `Passage`.
            key, read: as in `Tracing`, for code that the user runs in the backward; None reads the
                value.
        """


@runtime_checkable
class Region(Forward, Protocol):
    """Calls a module once per device, each on its own rows.

    Attributes:
        replicas: number of each replica, `[n]` int32, sharded.
        disagreements: label -> whether replicas differed where they must not, 0-dim int32.
        collects: whether the latest forward's Python has asked for a rank or a collective.
    """

    replicas: torch.Tensor
    disagreements: dict[str, torch.Tensor]
    collects: bool

    @property
    def recomputes(self) -> bool:
        """Whether the latest forward checkpoints activations."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward pass is still to come that runs parts of the latest forward again."""

    def backward(
        self,
        state: Mapping[str, torch.Tensor] | None = None,
        *,
        key: KeySource | None = None,
        read: Reader | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Context for a backward pass, in which checkpointing runs the latest forward again."""

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of a call that writes nothing to the module and allows no backward.

        Raises:
            ReplicaRegionError: the module does what can't be done per replica.
        """

    def recompute(self, policy: Recompute) -> None:
        """Has blocks of the model run again in backward from now on, as `policy` says."""

    def check_agreement(self) -> None:
        """Reads whether integer outputs and buffers were the same on every replica so far.

        Raises:
            ReplicaRegionError: one was not; the error names it.
        """


def ignore_writes(_: Collection[str]) -> None:
    """Ignores the names of the tensors that a forward wrote."""


def refuse_gradient_hooks(name: str, parameter: torch.Tensor) -> None:
    """Raises SpmdZeroUsageError when `parameter` has gradient hooks, which would never run."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise SpmdZeroUsageError(
            f"{name} has a gradient hook, which would never run: gradients leave the replica "
            "region on their way to sharded accumulators. Put the change into the loss, or into "
            "the config (gradient_clipping)"
        )
