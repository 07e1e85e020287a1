"""Descriptions of checkpoints."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from spmdzero.formats._open import format_of, locate, open_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDescription:
    """One tensor of a checkpoint: its name, shape, dtype and bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointDescription:
    """The contents of one checkpoint; `to_json` is for programs.

    Attributes:
        path: the folder of the tag.
        format: ``"native"``, ``"deepspeed"`` or ``"universal"``.
        counters: ``global_steps`` and the like.
        updates: number of updates of the weights; None where the checkpoint doesn't say.
        parameters: number of parameters, without buffers.
        elements: number of elements of all parameters.
        bytes: of all tensors.
        dtypes: dtype -> number of parameters that have it.
        roles: ``parameter``, ``master``, ``exp_avg``, ... -> bytes of all its tensors.
        groups: the hyperparameters of each param group; ``"params"`` is its number of parameters.
        scaler, scheduler: the states of the loss scale and the schedule, None for none.
        client_state: the keys of the caller's state.
        tensors: all tensors.
    """

    path: str
    format: str
    counters: dict[str, int]
    updates: int | None
    parameters: int
    elements: int
    bytes: int
    dtypes: dict[str, int]
    roles: dict[str, int]
    groups: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    client_state: list[str]
    tensors: tuple[TensorDescription, ...]

    def to_json(self) -> str:
        """The description as JSON text; values that JSON lacks become their `str`."""
        return json.dumps(dataclasses.asdict(self), indent=2, default=str)


def describe(source: Path, tag: str | None = None) -> CheckpointDescription:
    """Describes a checkpoint, spmdzero's or DeepSpeed's; needs no device.

    Args:
        source: a folder of checkpoints, or the folder of one tag.
        tag: the checkpoint in `source`; the one that `latest` names by default.

    Raises:
        SpmdZeroCheckpointError: the checkpoint is damaged, or there is none.
    """
    folder, tag = locate(source, tag)
    state = open_state(folder, tag)
    host = state.host
    tensors = tuple(
        TensorDescription(
            name=name,
            shape=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=tensor.size,
        )
        for name, tensor in state.tensors.items()
    )
    own = [tensor for tensor in tensors if tensor.name.startswith("parameter/")]
    roles: Counter[str] = Counter()
    for tensor in tensors:
        roles[tensor.name.partition("/")[0]] += tensor.bytes
    return CheckpointDescription(
        path=str(folder / tag),
        format=format_of(folder / tag),
        counters=dict(host.counters),
        updates=host.applied,
        parameters=len(own),
        elements=sum(math.prod(tensor.shape) for tensor in own),
        bytes=sum(tensor.bytes for tensor in tensors),
        dtypes=dict(Counter(tensor.dtype for tensor in own)),
        roles=dict(roles),
        groups=[
            group | {"params": len(group.get("params", ()))} for group in host.param_groups or ()
        ],
        scaler=dict(host.scaler) if host.scaler is not None else None,
        scheduler=dict(host.scheduler) if host.scheduler is not None else None,
        client_state=sorted(map(str, host.client_state)),
        tensors=tensors,
    )
