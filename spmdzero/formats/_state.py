"""What a training run is made of, apart from where it lives: the form that all formats share."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spmdzero.formats._boxes import Box, assemble, box_slices, whole_box


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a saved or a running state, whole by its shape, read in parts.

    Attributes:
        shape: of the whole tensor, never padded or flattened.
        dtype: of its elements.
        read: a part -> its elements, contiguous, on the CPU.
        pieces: the parts in which it is stored, which don't overlap; for a running state those
            that this process is to save. Reading one of them is cheapest.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]
    pieces: tuple[Box, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StoredTensor":
        """A CPU tensor that is in memory already."""
        box = whole_box(tensor.shape)
        return cls(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            read=lambda part: tensor[box_slices(part)].contiguous(),
            pieces=(box,),
        )

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def as_dtype(self, dtype: torch.dtype) -> "StoredTensor":
        """The same, cast while it is read if it is of floating point; integers stay as they are."""
        if not self.dtype.is_floating_point or self.dtype == dtype:
            return self
        return replace(self, dtype=dtype, read=lambda box: self.read(box).to(dtype).contiguous())

    def whole(self) -> torch.Tensor:
        """All of it, `[*shape]` on the CPU."""
        return self.read(whole_box(self.shape))


RESET_AT = "reset_at"


@dataclass(frozen=True, kw_only=True)
class HostState:
    """What of a run is no tensor on the devices. None stands for "the checkpoint doesn't say".

    Everything in it is written as it is and read without running code: numbers, strings, CPU
    tensors, and dicts, lists and tuples of them, and what `formats._safe_values` adds.

    Attributes:
        counters: by the names of `spmdzero.engine._counters.Counters`: ``global_steps``, ....
        applied: updates of the weights, what Adam corrects its bias by.
        skipped: updates left out for a gradient that was not finite.
        param_groups: the numbers of each param group (``lr``, ``betas``, ...), under ``"params"``
            the names of its parameters, in the optimizer's order, and under `RESET_AT` by name
            the value of `applied` when a parameter's states started anew apart from others'.
        scheduler: the schedule's `state_dict()`.
        hold: `ScheduleHold.state_dict()`.
        scaler: the attributes of fp16's `LossScaler` by name.
        accumulation: what the gradients of an unfinished step need besides ``accumulator/``.
        loader: `ZeroDataLoader.state_dict()` of the engine's own loader.
        rng: generators by name, of the process that saved it.
        extra: what modules return from `get_extra_state`, by state dict key.
        excluded: frozen parameters that were left out on purpose.
        client_state: the caller's.
        tied: further state dict key of a tied parameter -> the one it is saved under.
    """

    counters: Mapping[str, int] = field(default_factory=dict)
    applied: int | None = None
    skipped: int | None = None
    param_groups: list[dict[str, Any]] | None = None
    scheduler: Mapping[str, Any] | None = None
    hold: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    accumulation: Mapping[str, Any] | None = None
    loader: Mapping[str, Any] | None = None
    rng: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    client_state: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A run at one moment, in no way tied to a mesh, a ZeRO stage or a file format.

    Attributes:
        tensors: by the names of `Engine.named_tensors`:

            - ``parameter/<name>``: ``[*shape]`` in the model's dtype; tied ones once, under the
              name that `named_parameters` gives them;
            - ``buffer/<name>``: persistent buffers;
            - ``master/<name>``: ``[*shape]`` fp32, only where the parameter is not its own master;
            - ``<slot>/<name>``: an optimizer state, such as ``exp_avg/wte.weight``: ``[*shape]``,
              or 0-dim for a slot that is a scalar;
            - ``accumulator/<name>``: only within a step: ``[rows, *shape]`` summands of the
              gradient so far, times ``accumulation["unit"]``.
        host: everything else.
        source: where it came from, for messages.
        check: parts by tensor name -> raises SpmdZeroCheckpointError unless each of them can be
            read as it was written.
    """

    tensors: Mapping[str, StoredTensor]
    host: HostState
    source: str
    check: Callable[[Mapping[str, Iterable[Box]]], None] = lambda parts: None

    def checked(self) -> "TrainingState":
        """The same, all of whose tensors were checked."""
        self.check({name: tensor.pieces for name, tensor in self.tensors.items()})
        return self


def in_memory(state: TrainingState) -> TrainingState:
    """A copy of this process's part of a state that shares nothing with what it was read from."""

    def copied(tensor: StoredTensor) -> StoredTensor:
        held = {box: tensor.read(box).clone() for box in tensor.pieces}
        return replace(tensor, read=lambda box: assemble(box, held.items(), dtype=tensor.dtype))

    tensors = {name: copied(tensor) for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors, host=copy.deepcopy(state.host))
