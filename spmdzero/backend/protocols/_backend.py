"""The parts of a backend, which stands for one compiler under the engine."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from spmdzero.backend.protocols._arrays import Arrays
from spmdzero.backend.protocols._compiler import Compiler
from spmdzero.backend.protocols._device_memory import DeviceMemory
from spmdzero.backend.protocols._host_memory import HostMemory
from spmdzero.backend.protocols._mesh import Mesh, Reduction
from spmdzero.backend.protocols._programs import Counters, Flags, Lowering, Programs
from spmdzero.backend.protocols._region import Forward, Region
from spmdzero.backend.protocols._runtime import Runtime
from spmdzero.plan import MeshSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """Everything that knows devices. It has no rule of ZeRO and none of DeepSpeed.

    Attributes:
        name: of the backend, and of the package that it uses.
        device_type: torch's name for the devices: of `tensor.device.type`, and for autocast.
        runtime, arrays, programs, counters, flags: see their protocols.
        mesh: makes the devices of a `MeshSpec`.
        region: makes the `Region` that runs a module once per device. Arguments: `mesh`, `module`
            (its parameters and buffers live on the mesh, replicated), `sink`, `rules`, `autocast`
            (the dtype of `torch.autocast` around the forward, None for none) and `seed`: the
            gradients that reach the sink are `seed` times those of the global loss. It is 1, or the
            number of devices, with which each replica differentiates its own loss. `wrote` is
            called with the names of parameters and buffers that a forward wrote, once they hold
            their new values. `layouts` has the layouts of parameters that are stored as shards, and
            `parts` returns the `PartsOfGradients` that reduces theirs in loops; both are
            given where there are some, to a backend that can gather them.
        global_forward: makes the `Forward` that runs a module on the whole batch, which the
            compiler splits. Arguments: `mesh`, `module`, `autocast` and `wrote`.
        reduction: makes the `Reduction` that sums gradients over the replicas. Arguments: `mesh`,
            `method` (``"annotated"`` lets the compiler choose the collective, ``"explicit"`` names
            it) and `dtype`, in which gradients cross the wire, None for the gradient's own.
        global_norm: computes the L2 norm, 0-dim fp32, over all elements of tensors on a mesh, each
            with its `PartitionSpec`.
        in_region: whether this thread runs code of a replica.
        refuse_leak: raises ReplicaRegionError if a loss is computed from a tensor that never left
            its region.
        recomputed: calls a function with the arguments that follow, keeps only its inputs, and runs
            it again in the backward pass.
        recomputed_from_host: does what `recomputed` does, and keeps the inputs in the host's memory
            until backward; a log line says so if they stay on the devices.
        compiler: see its protocol; None for a backend that records each step.
        host_memory: the host's memory; None for a backend that can't use it.
        lowering: hands programs to compilers of chips that aren't here; None for a backend that
            can't.
        shared_replicas: whether devices can share the work of a replica, along an axis.
        loops: whether a program can run equal blocks of a model as one loop.
        low_precision: whether linear layers can multiply in 8 bits.
        attention_kernels: whether a program can compute attention by a kernel.
        views_in_inference_mode: whether a tensor made outside of `torch.inference_mode` can be
            viewed in it, as a linear layer does with its weight.
        world_of_devices: whether torch.distributed's world is the replicas in a forward; else it is
            the hosts there too.
        device_memory: the devices' memory; None for a backend that can't tell what a program takes.
    """

    name: str
    device_type: str
    runtime: Runtime
    arrays: Arrays
    programs: Programs
    counters: Counters
    flags: Flags
    mesh: Callable[[MeshSpec], Mesh]
    region: Callable[..., Region]
    global_forward: Callable[..., Forward]
    reduction: Callable[..., Reduction]
    global_norm: Callable[..., torch.Tensor]
    in_region: Callable[[], bool]
    refuse_leak: Callable[[torch.Tensor], None]
    recomputed: Callable[..., Any]
    recomputed_from_host: Callable[..., Any]
    host_memory: HostMemory | None = None
    compiler: Compiler | None = None
    lowering: Lowering | None = None
    shared_replicas: bool = True
    loops: bool = True
    low_precision: bool = True
    attention_kernels: bool = True
    views_in_inference_mode: bool = True
    world_of_devices: bool = True
    device_memory: DeviceMemory | None = None
