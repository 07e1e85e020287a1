"""The models in JAX, as one would write them for a TPU.

Weights are [inputs, outputs]; a layer's are a dict, its names without the layer. A model is three
functions of them: what goes into the layers, a layer, and the loss of what comes out.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from on_tpu.cases import Case

Weights = Mapping[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


class Attend(Protocol):
    """[rows, heads, length, size] of queries, of keys and of values -> as the queries."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array: ...


Loss = Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array], jax.Array]
"""Hidden states [rows, length, width], the head [vocabulary, width], its bias, targets -> mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer.

    Attributes:
        outer: shapes of what isn't in a layer.
        layer: shapes of one layer.
        enter: outer weights, tokens -> hidden states.
        block: a layer's weights, hidden states -> hidden states.
        leave: outer weights, hidden states, targets, loss -> the loss.
    """

    outer: Shapes
    layer: Shapes
    enter: Callable[[Weights, jax.Array], jax.Array]
    block: Callable[[Weights, jax.Array, Attend], jax.Array]
    leave: Callable[[Weights, jax.Array, jax.Array, Loss], jax.Array]


def transformer(case: Case) -> Model:
    """The model of a case."""
    models = {"gpt": _gpt, "llama": _llama, "moe": _moe, "bert": _bert, "vit": _vit}
    return models[case.model](case)


def _gpt(case: Case) -> Model:
    w = case.width
    layer = {
        **_norm_shapes("norm_1", w), **_norm_shapes("norm_2", w), **_linear_shapes("qkv", w, 3 * w),
        **_linear_shapes("out", w, w), **_linear_shapes("up", w, case.inner),
        **_linear_shapes("down", case.inner, w),
    }  # fmt: skip
    outer = {
        "token": (case.vocabulary, w), "position": (case.length, w), **_norm_shapes("norm", w),
        "head": (case.vocabulary, w),
    }  # fmt: skip

    def block(p: Weights, x: jax.Array, attend: Attend) -> jax.Array:
        rows, length, _ = x.shape
        split = _linear(p, "qkv", _norm(p, "norm_1", x)).reshape(rows, length, 3, case.heads, -1)
        q, k, v = split.transpose(2, 0, 3, 1, 4)
        x = x + _linear(p, "out", _joined(attend(q, k, v, causal=True)))
        up = _linear(p, "up", _norm(p, "norm_2", x))
        return x + _linear(p, "down", jax.nn.gelu(up, approximate=False))

    return Model(
        outer=outer, layer=layer, block=block,
        enter=lambda p, tokens: p["token"][tokens] + p["position"],
        leave=lambda p, x, y, loss: loss(_norm(p, "norm", x), p["head"], None, y),
    )  # fmt: skip


def _llama(case: Case) -> Model:
    w = case.width
    layer = {
        "norm_1": (w,), "norm_2": (w,), **_attention_shapes(case),
        "gate": (w, case.inner), "up": (w, case.inner), "down": (case.inner, w),
    }  # fmt: skip

    def block(p: Weights, x: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = _projected(case, p, _rms_norm(x, p["norm_1"]))
        x = x + _joined(attend(_turned(q), _turned(k), v, causal=True)) @ p["out"]
        y = _rms_norm(x, p["norm_2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    return _decoder(case, layer, block)


def _moe(case: Case) -> Model:
    """Qwen3-MoE: heads are normalised, and each token goes through some of the experts."""
    w, e, size = case.width, case.experts, case.size
    layer = {
        "norm_1": (w,), "norm_2": (w,), "norm_q": (size,), "norm_k": (size,),
        **_attention_shapes(case), "router": (w, e), "gate_up": (e, w, 2 * case.inner),
        "down": (e, case.inner, w),
    }  # fmt: skip

    def block(p: Weights, x: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = _projected(case, p, _rms_norm(x, p["norm_1"]))
        q, k = _rms_norm(q, p["norm_q"]), _rms_norm(k, p["norm_k"])
        x = x + _joined(attend(_turned(q), _turned(k), v, causal=True)) @ p["out"]
        y = _rms_norm(x, p["norm_2"]).reshape(-1, w)
        return x + _through_experts(case, p, y).reshape(x.shape)

    return _decoder(case, layer, block)


def _through_experts(case: Case, p: Weights, x: jax.Array) -> jax.Array:
    """Tokens `[tokens, width]`, sorted by experts, through JAX's own grouped kernels."""
    from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

    shares = jax.nn.softmax((x @ p["router"]).astype(jnp.float32), axis=-1)
    shares, experts = jax.lax.top_k(shares, case.active)
    shares = (shares / shares.sum(-1, keepdims=True)).astype(x.dtype)
    order = jnp.argsort(experts.reshape(-1))
    counts = jnp.bincount(experts.reshape(-1), length=case.experts).astype(jnp.int32)

    def product(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        # As MaxText: tiles of at most 512 x 1,024 x 1,024.
        tiles = tuple(map(min, (512, 1024, 1024), (len(rows), *matrices.shape[1:])))
        return gmm(rows, matrices, counts, rows.dtype, tiles)

    gate, up = jnp.split(product(x[order // case.active], p["gate_up"]), 2, axis=-1)
    out = product(jax.nn.silu(gate) * up, p["down"])[jnp.argsort(order)]
    return jnp.einsum("tkw,tk->tw", out.reshape(*shares.shape, -1), shares)


def _attention_shapes(case: Case) -> Shapes:
    w, kv = case.width, case.kv_heads * case.size
    heads = case.heads * case.size
    return {"q": (w, heads), "k": (w, kv), "v": (w, kv), "out": (heads, w)}


def _projected(case: Case, p: Weights, y: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(
        # By the name a policy keeps them.
        checkpoint_name(y @ p[name], "qkv").reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)
        for name, heads in (("q", case.heads), ("k", case.kv_heads), ("v", case.kv_heads))
    )


def _decoder(case: Case, layer: Shapes, block: Callable[..., jax.Array]) -> Model:
    w = case.width

    head = "head" if case.untied else "token"
    return Model(
        outer={"token": (case.vocabulary, w), "norm": (w,), head: (case.vocabulary, w)},
        layer=layer, block=block, enter=lambda p, tokens: p["token"][tokens],
        leave=lambda p, x, y, loss: loss(_rms_norm(x, p["norm"]), p[head], None, y),
    )  # fmt: skip


def _bert(case: Case) -> Model:
    w = case.width
    layer = {
        **_norm_shapes("norm_1", w), **_norm_shapes("norm_2", w), **_linear_shapes("q", w, w),
        **_linear_shapes("k", w, w), **_linear_shapes("v", w, w), **_linear_shapes("out", w, w),
        **_linear_shapes("up", w, case.inner), **_linear_shapes("down", case.inner, w),
    }  # fmt: skip
    outer = {
        "token": (case.vocabulary, w), "position": (case.length, w), **_norm_shapes("norm", w),
        **_linear_shapes("transform", w, w), **_norm_shapes("last", w), "bias": (case.vocabulary,),
    }  # fmt: skip

    def block(p: Weights, x: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = (
            _linear(p, n, x).reshape(*x.shape[:2], case.heads, -1).swapaxes(1, 2) for n in "qkv"
        )
        x = _norm(p, "norm_1", x + _linear(p, "out", _joined(attend(q, k, v, causal=False))))
        up = jax.nn.gelu(_linear(p, "up", x), approximate=False)
        return _norm(p, "norm_2", x + _linear(p, "down", up))

    def leave(p: Weights, x: jax.Array, y: jax.Array, loss: Loss) -> jax.Array:
        x = _norm(p, "last", jax.nn.gelu(_linear(p, "transform", x), approximate=False))
        return loss(x, p["token"], p["bias"], y)

    return Model(
        outer=outer, layer=layer, block=block, leave=leave,
        enter=lambda p, tokens: _norm(p, "norm", p["token"][tokens] + p["position"]),
    )  # fmt: skip


def _vit(case: Case) -> Model:
    w, side = case.width, case.length // case.patch
    layer = {
        **_norm_shapes("norm_1", w), **_norm_shapes("norm_2", w), **_linear_shapes("q", w, w),
        **_linear_shapes("k", w, w), **_linear_shapes("v", w, w), **_linear_shapes("out", w, w),
        **_linear_shapes("up", w, case.inner), **_linear_shapes("down", case.inner, w),
    }  # fmt: skip
    outer = {
        **_linear_shapes("patches", 3 * case.patch**2, w), "class": (1, 1, w),
        "position": (1, side**2 + 1, w), **_norm_shapes("norm", w), "head": (case.vocabulary, w),
        "bias": (case.vocabulary,),
    }  # fmt: skip

    def enter(p: Weights, images: jax.Array) -> jax.Array:
        cut = images.reshape(-1, 3, side, case.patch, side, case.patch)
        patches = cut.transpose(0, 2, 4, 1, 3, 5).reshape(len(images), side**2, -1)
        first = jnp.broadcast_to(p["class"], (len(images), 1, w))
        return jnp.concatenate((first, _linear(p, "patches", patches)), axis=1) + p["position"]

    def block(p: Weights, x: jax.Array, attend: Attend) -> jax.Array:
        y = _norm(p, "norm_1", x)
        q, k, v = (
            _linear(p, n, y).reshape(*x.shape[:2], case.heads, -1).swapaxes(1, 2) for n in "qkv"
        )
        x = x + _linear(p, "out", _joined(attend(q, k, v, causal=False)))
        up = jax.nn.gelu(_linear(p, "up", _norm(p, "norm_2", x)), approximate=False)
        return x + _linear(p, "down", up)

    return Model(
        outer=outer, layer=layer, block=block, enter=enter,
        leave=lambda p, x, y, loss: loss(_norm(p, "norm", x)[:, 0], p["head"], p["bias"], y),
    )  # fmt: skip


def _norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear_shapes(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def _linear(p: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ p[name + ".weight"] + p[name + ".bias"]


@jax.named_scope("aten__layer_norm")
def _norm(p: Weights, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled.astype(x.dtype) * p[name + ".weight"] + p[name + ".bias"]


@jax.named_scope("aten__rms_norm")
def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return scaled.astype(x.dtype) * weight


def _turned(x: jax.Array) -> jax.Array:
    size, length = x.shape[-1], x.shape[-2]
    halves = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), 500000.0**-halves)
    cos, sin = (jnp.tile(f(angles), 2).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-second, first), axis=-1) * sin


def _joined(mixed: jax.Array) -> jax.Array:
    rows, heads, length, size = mixed.shape
    return mixed.swapaxes(1, 2).reshape(rows, length, heads * size)


def attention(way: str) -> Attend:
    """``"plain"``, ``"repeated"``, ``"splash"`` or ``"splash-repeated"``.

    Grouped queries are computed as such, or with keys and values repeated for each query's head.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
        if way.endswith("repeated"):
            k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        made = _splash if way.startswith("splash") else _plain
        # `explain` reads these names: what is counted for attention, and which masks skip half.
        with jax.named_scope("causal_attention" if causal else "attention"):
            return made(q, k, v, causal=causal)

    return attend


def _plain(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    rows, _, length, size = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, length, size)
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", grouped, k) / size**0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
    return jnp.einsum("bhgqk,bhkd->bhgqd", weights, v).reshape(q.shape)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, length, size = q.shape[1:]
    # MaxText's blocks.
    block = min(512, length)
    sizes = kernels.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
        block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    shape = (length, length)
    mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1
    )
    return jax.vmap(kernel)(q / size**0.5, k, v)


def whole_loss(x: jax.Array, head: jax.Array, bias: Any, y: jax.Array) -> jax.Array:
    """With all logits at once, as `optax.softmax_cross_entropy_with_integer_labels` has them."""
    return _summed(x, head, bias, y) / y.size


def chunked_loss(x: jax.Array, head: jax.Array, bias: Any, y: jax.Array) -> jax.Array:
    """With the logits of 1,024 positions at a time, computed again in the backward."""
    chunk = min(1024, y.size)
    parts = (x.reshape(-1, chunk, x.shape[-1]), y.reshape(-1, chunk))

    @jax.checkpoint
    def more(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        return total + _summed(part[0], head, bias, part[1]), None

    return jax.lax.scan(more, jnp.zeros((), jnp.float32), parts)[0] / y.size


@jax.named_scope("cross_entropy")
def _summed(x: jax.Array, head: jax.Array, bias: Any, y: jax.Array) -> jax.Array:
    logits = x @ head.T
    logits = (logits if bias is None else logits + bias).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).sum()
