"""How long `spmdzero.initialize` takes beside moving the same parameters by hand."""

import gc
from collections.abc import Callable

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from harness.turns import Way, take_turns
from harness.workload import Workload
from peers.config import deepspeed_config
from torch import nn

import spmdzero


def to_and_mark(model: nn.Module, workload: Workload) -> nn.Module:
    """As torch_xla's guide does: `.to(device)`, then `mark_sharding` on each parameter."""
    mesh = _mesh(workload)
    model.to(torch_xla.device())
    for parameter in model.parameters():
        xs.mark_sharding(parameter, mesh, (None,) * parameter.dim())
    torch_xla.sync()
    return model


def upload_each(model: nn.Module, workload: Workload) -> list[torch.Tensor]:
    """The quickest way known: each parameter sent with its sharding, nothing else."""
    mesh, device, placed = _mesh(workload), torch_xla.device(), []
    for parameter in model.parameters():
        spec = xs.ShardingSpec(mesh, (None,) * parameter.dim())
        sent = xm.send_cpu_data_to_device([parameter.detach()], device, input_sharding=spec)
        placed += sent
    return placed


def from_cpu(model: nn.Module, workload: Workload) -> object:
    """`initialize` of a model on the CPU: parameters and AdamW's states."""
    return spmdzero.initialize(model=model, config=deepspeed_config(workload, stage=2))


def from_meta(model: nn.Module, workload: Workload) -> object:
    """`initialize` of a meta model whose weights a function hands over, and keeps none."""
    values = dict(model.state_dict())
    for parameter in model.parameters():
        # As `.to` and `initialize` do of a parameter that they have moved.
        parameter.data = torch.empty(0)
    empty = workload.build_on_meta()
    config = deepspeed_config(workload, stage=2)
    return spmdzero.initialize(model=empty, config=config, weights=values.pop)


WAYS = (upload_each, to_and_mark, from_cpu, from_meta)


def measure(model: str, devices: int, repeats: int, ways: list[str]) -> dict[str, list[float]]:
    """Seconds of each repetition, of each way that is named; they take turns."""
    workload = Workload(model=model, devices=devices, steps=1)
    spmdzero.init_distributed()

    def built(way: Callable[[nn.Module, Workload], object]) -> Way:
        def prepare(_: int) -> Callable[[], object]:
            # An engine is part of cycles, and four of them don't fit into the memory of a laptop.
            gc.collect()
            model = workload.build()
            return lambda: way(model, workload)

        return prepare

    taking_part = {way.__name__: built(way) for way in WAYS if way.__name__ in ways}
    taken = take_turns(taking_part, turns=repeats, warm_up=0)
    return {name: seconds.whole for name, seconds in taken.items()}


def _mesh(workload: Workload) -> xs.Mesh:
    return xs.Mesh(np.arange(workload.devices), (workload.devices,), ("fsdp",))
