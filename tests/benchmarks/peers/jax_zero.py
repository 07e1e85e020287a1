"""ZeRO-2 and ZeRO-3 written by hand in JAX: one `jax.jit`, `NamedSharding` for what is split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from harness import protocol
from harness.workload import CLIP, LEARNING_RATE, SIZES, WEIGHT_DECAY, Workload
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from peers._devices import peak_of_jax
from peers._jax_models import cnn_loss, gpt_loss

Tree = dict[str, jax.Array]
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class Peer(protocol.Peer):
    """Donated state, one program per step.

    Args:
        workload: what is trained.
        stage: 3 keeps parameters as shards, and gathers them in the forward and in the backward.
    """

    def __init__(self, workload: Workload, *, stage: int = 2) -> None:
        self._stage = stage
        self._mesh = Mesh(np.array(jax.devices()), ("fsdp",))
        if len(jax.devices()) != workload.devices:
            raise RuntimeError(f"{len(jax.devices())} devices, not {workload.devices}")
        if workload.model == "cnn":
            self._loss = cnn_loss
        else:
            heads, layers = SIZES[workload.model].heads, SIZES[workload.model].layers
            self._loss = functools.partial(
                gpt_loss, heads=heads, layers=layers, by_cudnn=workload.bf16
            )
            if workload.bf16:
                loss = self._loss
                self._loss = lambda p, x, y: loss(_to_bf16(p), x, y)
        self._compiled = jax.jit(self._update, donate_argnums=(0,))

    def place(self, model: nn.Module) -> None:
        self._whole = self._on(PartitionSpec())
        arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
        self._shards = {name: self._on(self._spec(a.shape)) for name, a in arrays.items()}
        zeros = jax.jit(
            lambda: {name: jnp.zeros(a.shape, a.dtype) for name, a in arrays.items()},
            out_shardings=self._shards,
        )
        self._resting = self._shards if self._stage == 3 else dict.fromkeys(arrays, self._whole)
        parameters = jax.device_put(arrays, self._resting)
        step = jax.device_put(jnp.zeros(()), self._whole)
        self._state = jax.block_until_ready((parameters, zeros(), zeros(), step))

    def _on(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._mesh, spec)

    def _spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Over the first dim that the devices divide; small tensors whole, as in spmdzero."""
        devices = self._mesh.size
        if np.prod(shape) >= 2048:
            for dim, length in enumerate(shape):
                if length % devices == 0:
                    return PartitionSpec(*(["fsdp" if i == dim else None for i in range(dim + 1)]))
        return PartitionSpec()

    def _update(self, state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        parameters, first, second, step = state
        loss, grads = jax.value_and_grad(self._of_resting)(parameters, inputs, targets)
        grads = self._constrain(grads, self._shards)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
        scale = jnp.minimum(1.0, CLIP / (norm + 1e-6))
        step = step + 1
        b1, b2 = _BETAS
        first = {k: b1 * first[k] + (1 - b1) * scale * g for k, g in grads.items()}
        second = {k: b2 * second[k] + (1 - b2) * (scale * g) ** 2 for k, g in grads.items()}

        def updated(name: str) -> jax.Array:
            mean = first[name] / (1 - b1**step)
            root = jnp.sqrt(second[name] / (1 - b2**step)) + _EPSILON
            own = jax.lax.with_sharding_constraint(parameters[name], self._shards[name])
            return own * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * mean / root

        new = self._constrain({name: updated(name) for name in parameters}, self._shards)
        return (self._constrain(new, self._resting), first, second, step), loss

    def _of_resting(self, parameters: Tree, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        if self._stage < 3:
            return self._loss(parameters, inputs, targets)

        # All that the backward needs is kept but the gathered parameters, which it gathers again.
        @functools.partial(
            jax.checkpoint, policy=jax.checkpoint_policies.save_anything_except_these_names("whole")
        )
        def gathered(shards: Tree) -> jax.Array:
            whole = self._constrain(shards, dict.fromkeys(shards, self._whole))
            named = {name: checkpoint_name(array, "whole") for name, array in whole.items()}
            return self._loss(named, inputs, targets)

        return gathered(parameters)

    def _constrain(self, tree: Tree, shardings: dict[str, NamedSharding]) -> Tree:
        return {k: jax.lax.with_sharding_constraint(t, shardings[k]) for k, t in tree.items()}

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> jax.Array:
        self._state, loss = self._compiled(self._state, *self._upload(inputs, targets))
        return loss

    def _upload(self, *tensors: torch.Tensor) -> tuple[jax.Array, ...]:
        arrays = (t.numpy() if t.is_floating_point() else t.int().numpy() for t in tensors)
        return tuple(jax.device_put(array, self._on(PartitionSpec("fsdp"))) for array in arrays)

    def read(self, loss: jax.Array) -> float:
        jax.block_until_ready(self._state)
        return float(loss)

    def programs(self) -> int:
        return self._compiled._cache_size()

    def peak_memory(self) -> int | None:
        return peak_of_jax()

    def wire_bytes(self, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        # Not before: torch_xla has no part in what was measured.
        from spmdzero.inspect import CollectiveLedger

        made = self._compiled.lower(self._state, *self._upload(inputs, targets)).compile()
        return CollectiveLedger.from_hlo(made.as_text()).wire_bytes


def _to_bf16(parameters: Tree) -> Tree:
    return {name: array.astype(jnp.bfloat16) for name, array in parameters.items()}
