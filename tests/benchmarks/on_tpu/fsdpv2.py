"""torch_xla's FSDPv2: fp32 shards of parameters and moments, which it computes with in bf16."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from harness.workload import Block
from torch import nn
from torch.nn.utils import parametrize
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from on_tpu import folder
from on_tpu.cases import BETAS, CLIP, EPSILON, LEARNING_RATE, SIZES, WEIGHT_DECAY, Case
from on_tpu.torch_models import BertBlock, Bottleneck, LlamaBlock, batch_of, build
from spmdzero.backend import programs, runtime

_BLOCKS = {Block, LlamaBlock, BertBlock, Bottleneck}


def measure(
    *,
    devices: int,
    root: str,
    size: str,
    case: str,
    options: dict[str, Any],
    requests: dict[str, Any],
) -> dict[str, Any]:
    """Traces the step and keeps the program, with how each of the topologies is asked for."""
    runtime.start()
    with runtime.tracing_only():
        step = _Step(SIZES[size][case], devices)
        placeholders = programs.placeholders()
        placeholders.stand_for(step.tensors)
        loss = step.trace()
        program = placeholders.program([loss, *step.states])
    told = {"input_shardings": dict(program.input_shardings)}
    asked = {topology: {**request, **told} for topology, request in requests.items()}
    return folder.keep_for_each(Path(root), program.module, asked)


class _Step:
    def __init__(self, case: Case, devices: int) -> None:
        self._mesh = xs.Mesh(np.arange(devices), (devices,), ("fsdp",))
        model = build(case, fused_loss=False, checkpointed=case.recompute).to_empty(
            device=torch_xla.device()
        )
        with torch.no_grad():
            for tensor in {*model.parameters(), *model.buffers()}:
                tensor.zero_()
        for module in list(model.modules()):
            for name, _ in list(module.named_parameters(recurse=False)):
                parametrize.register_parametrization(module, name, _Lean(), unsafe=True)
        wrapped = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=_BLOCKS)
        self._model = SpmdFullyShardedDataParallel(
            model, mesh=self._mesh, shard_output=_shard_output, auto_wrap_policy=wrapped
        )
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
        )  # fmt: skip
        moments = []
        for parameter in self._parameters:
            pair = [torch.zeros_like(parameter, requires_grad=False) for _ in range(2)]
            for moment in pair:
                longest = max(range(moment.dim()), key=lambda i: moment.shape[i])
                self._mark(moment, longest)
            names = ("exp_avg", "exp_avg_sq")
            state = {"step": torch.tensor(10.0), **dict(zip(names, pair, strict=True))}
            self._optimizer.state[parameter] = state
            moments += pair
        self._batch = [
            torch.zeros_like(t, device=torch_xla.device()) for t in batch_of(case, devices=devices)
        ]
        for tensor in self._batch:
            self._mark(tensor, 0)
        self.states = [*self._parameters, *moments, *self._model.buffers()]
        self.tensors = [*self.states, *self._batch]

    def _mark(self, tensor: torch.Tensor, dim: int) -> None:
        spec = tuple("fsdp" if i == dim else None for i in range(tensor.dim()))
        xs.mark_sharding(tensor, self._mesh, spec)

    def trace(self) -> torch.Tensor:
        """Traces a step; returns its loss."""
        loss = self._model(*self._batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        return loss.detach()


class _Lean(nn.Module):
    """What a layer computes with in the place of its fp32 parameter."""

    def forward(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.to(torch.bfloat16)


def _shard_output(output: torch.Tensor, mesh: xs.Mesh) -> None:
    if output.dim():
        xs.mark_sharding(output, mesh, ("fsdp", *[None] * (output.dim() - 1)))
