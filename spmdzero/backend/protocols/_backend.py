"""One compiler's front end under the engine."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from spmdzero.backend.protocols._arrays import Arrays
from spmdzero.backend.protocols._compiler import Compiler
from spmdzero.backend.protocols._mesh import Mesh, Reduction
from spmdzero.backend.protocols._programs import Counters, Flags, MemoryMaps, Programs
from spmdzero.backend.protocols._region import Forward, Region
from spmdzero.backend.protocols._runtime import Runtime
from spmdzero.plan import MeshSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """Everything that knows devices. It owns no rule of ZeRO, and none of DeepSpeed's.

    Attributes:
        name: the package that it stands on.
        device_type: torch's name for the devices: of `tensor.device.type`, and for autocast.
        runtime, arrays, programs, compiler, counters, flags, memory_maps: see their protocols.
        mesh: makes the devices of a `MeshSpec`.
        region: makes what runs a module per device, of `mesh`, `module` (its parameters and buffers
            live on the mesh, replicated), `sink`, `rules`, `autocast` (the dtype of
            `torch.autocast` around the forward, None for none) and `seed`: how many times the
            global loss's gradients those that reach the sink are, 1, or the number of devices, with
            which each replica differentiates its own loss. `wrote` is told the names of parameters
            and buffers that a forward wrote, once they hold their new values. `layouts` says where
            parameters rest that rest as shards, and `parts` returns how a loop reduces their
            gradients; they are given where there are some, to a backend that can gather them.
        global_forward: makes what runs a module on the whole batch, which the compiler splits, of
            `mesh`, `module`, `autocast` and `wrote`.
        reduction: makes what sums gradients over the replicas, of `mesh`, `method` (``"annotated"``
            lets the compiler choose the collective, ``"explicit"`` names it) and `dtype`: that
            which crosses the wire, None for the gradient's own.
        global_norm: the L2 norm, 0-dim fp32, over all elements of tensors, each with its
            `PartitionSpec`, on a mesh.
        in_region: whether this thread runs what belongs to a replica.
        refuse_leak: raises ReplicaRegionError where a loss is computed with what didn't leave a
            region.
        recomputed: calls a function with what follows, keeps its inputs only, and runs it again in
            the backward pass.
    """

    name: str
    device_type: str
    runtime: Runtime
    arrays: Arrays
    programs: Programs
    compiler: Compiler
    counters: Counters
    flags: Flags
    memory_maps: MemoryMaps
    mesh: Callable[[MeshSpec], Mesh]
    region: Callable[..., Region]
    global_forward: Callable[..., Forward]
    reduction: Callable[..., Reduction]
    global_norm: Callable[..., torch.Tensor]
    in_region: Callable[[], bool]
    refuse_leak: Callable[[torch.Tensor], None]
    recomputed: Callable[..., Any]
