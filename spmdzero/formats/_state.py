"""The form of a training state that all file formats share, independent of where it lives."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spmdzero.formats._boxes import Box, assemble, box_slices, whole_box


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a saved or running state, with its whole shape, which is read in parts.

    Attributes:
        shape: of the whole tensor, never padded or flattened.
        dtype: of its elements.
        read: maps a part to its elements, contiguous, on the CPU.
        pieces: the disjoint parts in which it is stored; for a running state those that this
            process has to save. Reading exactly one piece is cheapest.
        held: for a running state the parts that this process's devices hold, whichever process has
            to save them; equal or disjoint.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]
    pieces: tuple[Box, ...]
    held: tuple[Box, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StoredTensor":
        """A stored tensor for a CPU tensor that is in memory already."""
        box = whole_box(tensor.shape)
        return cls(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            read=lambda part: tensor[box_slices(part)].contiguous(),
            pieces=(box,),
        )

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def as_dtype(self, dtype: torch.dtype) -> "StoredTensor":
        """The tensor, cast while it is read if it is floating; integers stay as they are."""
        if not self.dtype.is_floating_point or self.dtype == dtype:
            return self
        return replace(self, dtype=dtype, read=lambda box: self.read(box).to(dtype).contiguous())

    def whole(self) -> torch.Tensor:
        """The whole tensor, `[*shape]` on the CPU."""
        return self.read(whole_box(self.shape))


RESET_AT = "reset_at"


@dataclass(frozen=True, kw_only=True)
class HostState:
    """The parts of a run that aren't tensors on the devices; None means that one isn't known.

    All of it is written as it is and read without running code: numbers, strings, CPU tensors, and
    dicts, lists and tuples of them, and the values that `formats._safe_values` adds.

    Attributes:
        counters: by the names of `spmdzero.engine._counters.Counters`: ``global_steps``, ....
        applied: number of updates of the weights, by which Adam corrects its bias.
        skipped: number of updates left out because a gradient was not finite.
        param_groups: the hyperparameters of each param group (``lr``, ``betas``, ...). ``"params"``
            has the names of its parameters, in the optimizer's order; `RESET_AT` has by name the
            value of `applied` at which a parameter's states started anew apart from others'.
        scheduler: the schedule's `state_dict()`.
        hold: `ScheduleHold.state_dict()`.
        scaler: the attributes of fp16's `LossScaler` by name.
        accumulation: values that an unfinished step's gradients need besides ``accumulator/``.
        loader: `ZeroDataLoader.state_dict()` of the engine's own loader.
        rng: states of the saving process's random generators, by name.
        extra: results of modules' `get_extra_state`, by state dict key.
        excluded: frozen parameters that were left out on purpose.
        client_state: the caller's state.
        tied: further state dict key of a tied parameter -> the key under which it is saved.
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
    """A run at one moment, independent of mesh, ZeRO stage and file format.

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
    """

    tensors: Mapping[str, StoredTensor]
    host: HostState
    source: str
    check: Callable[[Mapping[str, Iterable[Box]]], None] = lambda parts: None

    def checked(self) -> "TrainingState":
        """This state, after checking all of its tensors."""
        self.check({name: tensor.pieces for name, tensor in self.tensors.items()})
        return self


def in_memory(state: TrainingState) -> TrainingState:
    """A copy of this process's part of a state, which shares nothing with its source."""

    def copied(tensor: StoredTensor) -> StoredTensor:
        held = {box: tensor.read(box).clone() for box in tensor.pieces}
        return replace(tensor, read=lambda box: assemble(box, held.items(), dtype=tensor.dtype))

    tensors = {name: copied(tensor) for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors, host=copy.deepcopy(state.host))
