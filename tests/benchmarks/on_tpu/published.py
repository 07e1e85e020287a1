"""A decoder as MaxText writes it, by which steps that others measured are compiled again.

Weights are annotated and gathered by the compiler, layers are one scan, and what of a layer is kept
for the backward, on the device or in the host's memory, follows from names.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from on_tpu import folder

Tree = dict[str, jax.Array]
_B1, _B2, _EPSILON, _RATE, _DECAY, _CLIP = 0.9, 0.95, 1e-8, 3e-5, 0.1, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published step.

    Attributes:
        width, layers, heads, kv_heads, inner, vocabulary, head_size: of the decoder.
        experts, active, capacity: of a mixture, its experts, those of a token, and how many times
            its even share of tokens an expert takes.
        rows, length: of each device, and tokens of a row.
        tensor: devices among which each matrix is split besides; the others shard it (ZeRO-3).
        kept, offloaded: names of what a layer keeps on the device, and in the host's memory.
        block: side of attention's blocks.
        fused: whether attention's backward is one kernel.
        weights, moment: dtypes of the parameters and of Adam's first moment.
        vocabulary_tiles: parts in which the loss is computed, its logits again in the backward.
        wide_logits: whether the head's product has fp32 operands.
        tied: whether the head is the table of the embedding.
        looked_up: whether the embedding is a lookup, in the place of a product.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    rows: int
    length: int
    head_size: int = 128
    experts: int = 0
    active: int = 0
    capacity: float = 0.0
    tensor: int = 1
    kept: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    block: int = 512
    fused: bool = False
    weights: str = "float32"
    moment: str = "float32"
    vocabulary_tiles: int = 1
    wide_logits: bool = False
    tied: bool = False
    looked_up: bool = False


def measure(
    *, devices: int, root: str, recipe: dict[str, Any], requests: dict[str, Any]
) -> dict[str, Any]:
    """Lowers the step and keeps the program, with how each of the topologies is asked for."""
    jax.config.update("jax_traceback_in_locations_limit", 0)
    told = {name: tuple(v) if isinstance(v, list) else v for name, v in recipe.items()}
    return folder.keep_for_each(Path(root), _Step(Recipe(**told), devices).module(), requests)


class _Step:
    def __init__(self, recipe: Recipe, devices: int) -> None:
        self.recipe = recipe
        shape = (devices // recipe.tensor, recipe.tensor)
        self.mesh = Mesh(np.array(jax.devices()[:devices]).reshape(shape), ("fsdp", "tensor"))
        self.shapes, self.specs = self._weights()

    def _weights(self) -> tuple[dict[str, tuple[int, ...]], dict[str, P]]:
        r = self.recipe
        w, f, t = r.width, "fsdp", "tensor"
        layer: dict[str, tuple[tuple[int, ...], P]] = {
            "norm_1": ((w,), P()),
            "norm_2": ((w,), P()),
            "q": ((w, r.heads, r.head_size), P(f, t)),
            "k": ((w, r.kv_heads, r.head_size), P(f, t)),
            "v": ((w, r.kv_heads, r.head_size), P(f, t)),
            "out": ((r.heads, r.head_size, w), P(t, None, f)),
        }
        if r.experts:
            layer |= {
                "router": ((w, r.experts), P(f)),
                "gate": ((r.experts, w, r.inner), P(None, f, t)),
                "up": ((r.experts, w, r.inner), P(None, f, t)),
                "down": ((r.experts, r.inner, w), P(None, t, f)),
            }
        else:
            layer |= {
                "gate": ((w, r.inner), P(f, t)),
                "up": ((w, r.inner), P(f, t)),
                "down": ((r.inner, w), P(t, f)),
            }
        found = {"token": ((r.vocabulary, w), P(t, f)), "norm": ((w,), P())}
        if not r.tied:
            found["head"] = ((w, r.vocabulary), P(f, t))
        found |= {
            f"layers/{name}": ((r.layers, *shape), P(None, *spec))
            for name, (shape, spec) in layer.items()
        }
        return {n: s for n, (s, _) in found.items()}, {n: p for n, (_, p) in found.items()}

    def module(self) -> bytes:
        """The lowered program as StableHLO, its state donated."""
        r = self.recipe
        state = {n: NamedSharding(self.mesh, spec) for n, spec in self.specs.items()}
        scalar, batch = NamedSharding(self.mesh, P()), NamedSharding(self.mesh, P("fsdp"))
        jitted = jax.jit(
            self._step,
            in_shardings=(state, state, state, scalar, batch, batch),
            out_shardings=(state, state, state, scalar, scalar),
            donate_argnums=(0, 1, 2, 3),
        )
        trees = [
            {n: jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for n, s in self.shapes.items()}
            for dtype in (r.weights, r.moment, r.weights)
        ]
        tokens = jax.ShapeDtypeStruct((r.rows * self.mesh.size, r.length), jnp.int32)
        exported = jax.export.export(
            jitted, platforms=["tpu"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tpu_custom_call")],
        )(*trees, jax.ShapeDtypeStruct((), jnp.int32), tokens, tokens)  # fmt: skip
        return exported.mlir_module().encode()

    def _at(self, x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def _step(self, p: Tree, m: Tree, v: Tree, t: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        loss, g = jax.value_and_grad(self._loss)(p, x, y)
        with jax.named_scope("zero.update"):
            return *_adamw(p, m, v, t, g), loss

    def _loss(self, p: Tree, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        r = self.recipe
        table = p["token"].astype(jnp.bfloat16)
        # A lookup as a product needs no gather.
        hot = jax.nn.one_hot(tokens, r.vocabulary, dtype=jnp.bfloat16)
        hidden = self._stream(table[tokens] if r.looked_up else hot @ table)
        policy = None
        if r.kept or r.offloaded:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(r.kept),
                names_which_can_be_offloaded=list(r.offloaded),
                offload_src="device",
                offload_dst="pinned_host",
            )
        block = jax.checkpoint(self._layer, policy=policy, prevent_cse=False)
        stacked = {n.partition("/")[2]: a for n, a in p.items() if n.startswith("layers/")}
        hidden, _ = jax.lax.scan(lambda h, q: (block(q, h), None), hidden, stacked)
        hidden = _rms_norm(hidden, p["norm"])
        losses = functools.partial(self._losses, p["token"].T if r.tied else p["head"])
        if r.vocabulary_tiles == 1:
            return losses(hidden, targets) / targets.size
        tiles = tuple(
            jnp.moveaxis(a.reshape(a.shape[0], r.vocabulary_tiles, -1, *a.shape[2:]), 1, 0)
            for a in (hidden, targets)
        )
        again = jax.checkpoint(losses)
        total, _ = jax.lax.scan(lambda s, part: (s + again(*part), None), jnp.float32(0), tiles)
        return total / targets.size

    @jax.named_scope("cross_entropy")
    def _losses(self, head: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        wide = jnp.float32 if self.recipe.wide_logits else jnp.bfloat16
        logits = jnp.einsum("bsd,dv->bsv", hidden.astype(wide), head.astype(wide))
        logits = self._at(logits, "fsdp", None, "tensor").astype(jnp.float32)
        picked = (jax.nn.one_hot(targets, logits.shape[-1]) * logits).sum(-1)
        return (jax.nn.logsumexp(logits, axis=-1) - picked).sum()

    def _stream(self, x: jax.Array) -> jax.Array:
        return self._at(x, "fsdp", None, "tensor" if self.recipe.tensor > 1 else None)

    def _layer(self, p: Tree, x: jax.Array) -> jax.Array:
        p = {n: a.astype(jnp.bfloat16) for n, a in p.items()}
        x = checkpoint_name(self._stream(x), "decoder_layer_input")
        y = self._stream(_rms_norm(x, p["norm_1"]))
        q, k, v = (
            self._at(jnp.einsum("bsd,dhk->bshk", y, p[n]), "fsdp", None, "tensor") for n in "qkv"
        )
        q = checkpoint_name(_turned(q), "query_proj")
        k, v = checkpoint_name(_turned(k), "key_proj"), checkpoint_name(v, "value_proj")
        mixed = jnp.einsum("bshk,hkd->bsd", self._attend(q, k, v), p["out"])
        x = self._stream(x + checkpoint_name(self._stream(mixed), "out_proj"))
        y = self._stream(_rms_norm(x, p["norm_2"]))
        mlp = self._experts if self.recipe.experts else self._mlp
        return self._stream(x + checkpoint_name(self._stream(mlp(p, y)), "mlpwo"))

    def _mlp(self, p: Tree, y: jax.Array) -> jax.Array:
        gate, up = (
            checkpoint_name(self._at(y @ p[n], "fsdp", None, "tensor"), name)
            for n, name in (("gate", "mlpwi_0"), ("up", "mlpwi_1"))
        )
        return (jax.nn.silu(gate) * up) @ p["down"]

    def _experts(self, p: Tree, y: jax.Array) -> jax.Array:
        """Each row's tokens among experts of a bounded capacity, by products with masks."""
        r = self.recipe
        most = int(r.length * r.active / r.experts * r.capacity)
        shares, chosen = jax.lax.top_k((y @ p["router"]).astype(jnp.float32), r.active)
        shares = jax.nn.softmax(shares, axis=-1)
        hot = jax.nn.one_hot(
            chosen, r.experts, dtype=jnp.float32
        )  # [rows, tokens, active, experts]
        flat = hot.reshape(hot.shape[0], -1, r.experts)
        place = (jnp.cumsum(flat, axis=1) * flat).reshape(hot.shape)
        kept = jnp.where(place <= most, place, 0)
        seat = jax.nn.one_hot(kept.sum(2).astype(jnp.int32) - 1, most, dtype=jnp.bfloat16)
        weight = (hot * shares[..., None]).sum(2).astype(jnp.bfloat16)
        given = jnp.einsum("bsd,bsec->ebcd", y, seat)
        given = self._at(given, None, "fsdp")
        gate, up = (
            checkpoint_name(jnp.einsum("ebcd,edf->ebcf", given, p[n]), name)
            for n, name in (("gate", "mlpwi_0"), ("up", "mlpwi_1"))
        )
        made = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, p["down"])
        return jnp.einsum("ebcd,bsec->bsd", made, seat * weight[..., None])

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        r = self.recipe
        b = min(r.block, r.length)
        dq = {} if r.fused else {"block_q_dq": b, "block_kv_dq": b}
        sizes = kernels.BlockSizes(
            block_q=b, block_kv=b, block_kv_compute=b, block_q_dkv=b, block_kv_dkv=b,
            block_kv_dkv_compute=b, use_fused_bwd_kernel=r.fused, **dq,
        )  # fmt: skip
        mask = masks.MultiHeadMask([masks.CausalMask((r.length, r.length))] * (r.heads // r.tensor))
        kernel = kernels.make_splash_mha(
            mask, block_sizes=sizes, head_shards=1, q_seq_shards=1,
            residual_checkpoint_name="context",
        )  # fmt: skip

        def own(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            # `explain` reads this name: a causal mask skips half.
            with jax.named_scope("causal_attention"):
                return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)

        spec = P("fsdp", None, "tensor")
        on_each: Any = jax.shard_map(
            own, mesh=self.mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
        )
        return on_each(q, k, v)


@jax.named_scope("aten__rms_norm")
def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return scaled.astype(x.dtype) * weight.astype(x.dtype)


def _turned(x: jax.Array) -> jax.Array:
    """Rotated by positions, [rows, tokens, heads, size]."""
    size, length = x.shape[-1], x.shape[1]
    halves = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), 500000.0**-halves)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _adamw(p: Tree, m: Tree, v: Tree, t: jax.Array, g: Tree) -> tuple[Tree, Tree, Tree, Any]:
    squares = sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in g.values())
    scale = jnp.minimum(1.0, _CLIP / (jnp.sqrt(squares) + 1e-6))
    t = t + 1
    g = {n: scale * a.astype(jnp.float32) for n, a in g.items()}
    first = {n: _B1 * m[n].astype(jnp.float32) + (1 - _B1) * a for n, a in g.items()}
    second = {n: _B2 * v[n].astype(jnp.float32) + (1 - _B2) * a * a for n, a in g.items()}

    def updated(n: str) -> jax.Array:
        root = jnp.sqrt(second[n] / (1 - _B2**t)) + _EPSILON
        old = p[n].astype(jnp.float32)
        return (old - _RATE * (first[n] / (1 - _B1**t) / root + _DECAY * old)).astype(p[n].dtype)

    def as_kept(tree: Tree, like: Mapping[str, jax.Array]) -> Tree:
        return {n: a.astype(like[n].dtype) for n, a in tree.items()}

    return {n: updated(n) for n in p}, as_kept(first, m), as_kept(second, v), t
