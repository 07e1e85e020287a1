"""What a pass through the replica region takes, and what it comes to."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

GradientSink = Callable[[str, torch.Tensor], None]
KeySource = Callable[[int], torch.Tensor]
Reader = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracing:
    """What a pass through the region uses in the place of the module's own.

    Attributes:
        parameters, buffers: by name; global tensors, a parameter requires a gradient as its own.
        sink: see `ReplicaRegion`.
        key: the value of a random draw's key, drawn on the host -> the key, 0-dim int32, global.
        read: called where Python reads a value, unless uploads are recorded and it is fixed.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    sink: GradientSink
    key: KeySource
    read: Reader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    """What a pass through the region came to, in global space.

    Attributes:
        output: what the module returned.
        buffers: name -> the new value of a buffer that the module wrote.
        flags: of what has to be the same on all replicas, 0-dim int32, 1 where it is not.
        state: name -> the replicas' parameter or buffer, for `ReplicaRegion.backward`.
    """

    output: Any
    buffers: Mapping[str, torch.Tensor]
    flags: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
