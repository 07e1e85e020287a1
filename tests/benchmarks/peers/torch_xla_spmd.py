"""torch_xla without spmdzero: SPMD data parallel, or its FSDPv2."""

import functools

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from harness.workload import CLIP, LEARNING_RATE, WEIGHT_DECAY, Block, Workload
from torch import nn
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from peers._devices import DevicesPeer
from spmdzero.backend.torch_xla import optimized_hlo, runtime
from spmdzero.inspect import CollectiveLedger


class Peer(DevicesPeer):
    """Traces every step, as torch_xla's own examples do."""

    def __init__(self, workload: Workload, *, sharded: bool) -> None:
        super().__init__(workload)
        self._mesh = xs.Mesh(np.arange(workload.devices), (workload.devices,), ("fsdp",))
        self._sharded = sharded

    def place(self, model: nn.Module) -> None:
        if self._sharded:
            self._model: nn.Module = SpmdFullyShardedDataParallel(
                model,
                mesh=self._mesh,
                shard_output=self._shard_output,
                auto_wrap_policy=functools.partial(
                    transformer_auto_wrap_policy, transformer_layer_cls={Block}
                ),
            )
        else:
            self._model = model.to(torch_xla.device())
            for parameter in model.parameters():
                xs.mark_sharding(parameter, self._mesh, (None,) * parameter.dim())
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        torch_xla.sync()
        runtime.wait()

    def _shard_output(self, output: torch.Tensor, mesh: xs.Mesh) -> None:
        if output.dim():
            xs.mark_sharding(output, mesh, ("fsdp", *[None] * (output.dim() - 1)))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._trace(inputs, targets)
        torch_xla.sync()
        return loss

    def _trace(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = self._model(self._upload(inputs), self._upload(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        return loss.detach()

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        spec = xs.ShardingSpec(self._mesh, ("fsdp", *[None] * (tensor.dim() - 1)))
        (placed,) = xm.send_cpu_data_to_device([tensor], torch_xla.device(), input_sharding=spec)
        return placed

    def wire_bytes(self, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        loss = self._trace(inputs, targets)
        states = [t for s in self._optimizer.state.values() for t in s.values() if t.dim()]
        text = optimized_hlo([loss, *self._model.parameters(), *states])
        return CollectiveLedger.from_hlo(text).wire_bytes
