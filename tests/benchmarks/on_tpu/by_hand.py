"""The step by hand in JAX, lowered for a TPU without one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from on_tpu import folder, jax_resnet
from on_tpu.cases import BETAS, CLIP, EPSILON, LEARNING_RATE, SIZES, WEIGHT_DECAY, Case
from on_tpu.jax_models import attention, chunked_loss, transformer, whole_loss

Tree = dict[str, jax.Array]
LossOf = Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]
_WHOLE = 2048  # elements; smaller ones are kept whole, as spmdzero keeps them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a step is written.

    Attributes:
        attention: see `jax_models.attention`.
        loss: ``"whole"`` or ``"chunked"``.
        region: whether the step is one `shard_map` that reduces and gathers by calls; otherwise
            shardings are annotated, and the compiler finds out.
        scan: whether the layers are one loop over stacked weights.
        zero: 2 keeps bf16 parameters whole; 3 gathers each layer's from fp32 shards.
        recompute: ``"no"``; ``"all"`` of a block; ``"qkv"``, all but the projections to queries,
            keys and values; ``"qkv-on-host"``, which keeps these in the host's memory.
    """

    attention: str = "plain"
    loss: str = "whole"
    region: bool = False
    scan: bool = False
    zero: int = 2
    recompute: str = ""


def measure(
    *,
    devices: int,
    root: str,
    size: str,
    case: str,
    options: dict[str, Any],
    requests: dict[str, Any],
) -> dict[str, Any]:
    """Lowers the step and keeps the program, with how each of the topologies is asked for."""
    # An equal program is compiled once, wherever the lines are that wrote it.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    what = SIZES[size][case]
    way = Way(**options)
    if not way.recompute:
        way = dataclasses.replace(way, recompute="all" if what.recompute else "no")
    if what.model == "resnet":
        # Batch statistics of each device's rows are what a replica region computes.
        way = dataclasses.replace(way, region=True)
    return folder.keep_for_each(Path(root), _Step(what, way, devices).module(), requests)


class _Step:
    def __init__(self, case: Case, way: Way, devices: int) -> None:
        self.case, self.way, self.devices = case, way, devices
        self.mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
        self.shapes, self.running = _shapes(case, way)
        self.dims = {n: self._dim(n, shape) for n, shape in self.shapes.items()}
        self.specs = {n: self._spec(n) for n in self.shapes}

    def _dim(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The dim that is sharded: one whose shards are whole tiles where there is one."""
        first = 1 if self.way.scan and name.startswith("layers.") else 0
        if np.prod(shape[first:]) < _WHOLE:
            return None
        for tiles in ((8, 128), (1, 1)):
            for dim in range(first, len(shape)):
                tile = tiles[1] if dim == len(shape) - 1 else tiles[0]
                if shape[dim] % (self.devices * tile) == 0:
                    return dim
        return None

    def _spec(self, name: str) -> P:
        dim = self.dims[name]
        return P() if dim is None else P(*[None] * dim, "fsdp")

    def module(self) -> bytes:
        """The lowered program as StableHLO, its state donated."""
        way, case = self.way, self.case
        whole, split = P(), P("fsdp")
        parameters = {} if way.zero == 3 else dict.fromkeys(self.shapes, whole)
        states = (self.specs,) * 3
        running = dict.fromkeys(self.running, whole)
        ins = (parameters, *states, whole, running, split, split)
        outs = (parameters, *states, whole, running, whole)
        step = self._region if way.region else self._annotated
        if way.region:
            step = jax.shard_map(
                step, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False
            )
        shardings = jax.tree.map(lambda s: NamedSharding(self.mesh, s), (ins, outs))
        kept = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in self.shapes.items()}
        lean = {n: jax.ShapeDtypeStruct(self.shapes[n], jnp.bfloat16) for n in parameters}
        seen = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in self.running.items()}
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        jitted = jax.jit(
            step, in_shardings=shardings[0], out_shardings=shardings[1],
            donate_argnums=tuple(range(6)),
        )  # fmt: skip
        # Exported, since that writes the version of Mosaic that libtpu reads.
        exported = jax.export.export(
            jitted, platforms=["tpu"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tpu_custom_call")],
        )(lean, kept, kept, kept, scalar, seen, *_batch(case, self.devices))  # fmt: skip
        return exported.mlir_module().encode()

    def _annotated(self, p: Tree, master: Tree, m: Tree, v: Tree, t: Any, seen: Tree, x, y) -> Any:
        (loss, _), g = jax.value_and_grad(self._loss_of(lambda _, w: w), has_aux=True)(p, x, y)
        g = {n: self._sharded(a, n).astype(jnp.float32) for n, a in g.items()}
        norm = sum(jnp.sum(a * a) for a in g.values())
        master, m, v, t = _adamw(master, m, v, t, g, norm)
        p = {n: self._whole(self._sharded(a.astype(jnp.bfloat16), n)) for n, a in master.items()}
        return p, master, m, v, t, seen, loss

    def _sharded(self, array: jax.Array, name: str) -> jax.Array:
        sharding = NamedSharding(self.mesh, self.specs[name])
        return jax.lax.with_sharding_constraint(array, sharding)

    def _whole(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, P()))

    def _region(self, p: Tree, master: Tree, m: Tree, v: Tree, t: Any, seen: Tree, x, y) -> Any:
        def gathered(name: str, shard: jax.Array) -> jax.Array:
            dim, inside = self.dims[name], self.way.scan and name.startswith("layers.")
            lean = shard.astype(jnp.bfloat16)
            if dim is None:
                return lean
            return jax.lax.all_gather(lean, "fsdp", axis=dim - inside, tiled=True)

        if self.way.zero == 3:
            loss_of = self._loss_of(gathered)
            (loss, aux), g = jax.value_and_grad(loss_of, has_aux=True)(master, x, y)
            # The gradient of a gather is a reduce-scatter.
            g |= _summed_together({n: a for n, a in g.items() if self.dims[n] is None})
        else:
            loss_of = self._loss_of(lambda _, w: w)
            (loss, aux), g = jax.value_and_grad(loss_of, has_aux=True)(p, x, y)
            small = _summed_together({n: a for n, a in g.items() if self.dims[n] is None})
            g = {n: self._reduced(n, a) if n not in small else small[n] for n, a in g.items()}
        g = {n: a / self.devices for n, a in g.items()}
        shards = [jnp.sum(a * a) for n, a in g.items() if self.dims[n] is not None]
        wholes = [jnp.sum(a * a) for n, a in g.items() if self.dims[n] is None]
        norm = jax.lax.psum(sum(shards), "fsdp") + sum(wholes)
        master, m, v, t = _adamw(master, m, v, t, g, norm)
        if self.way.zero == 2:
            p = {n: gathered_whole(a, self.dims[n]) for n, a in master.items()}
        if aux:
            mean = {n: jax.lax.pmean(a, "fsdp") for n, a in aux.items()}
            seen = {n: 0.9 * a + 0.1 * mean[n] for n, a in seen.items()}
        return p, master, m, v, t, seen, jax.lax.pmean(loss, "fsdp")

    def _reduced(self, name: str, g: jax.Array) -> jax.Array:
        dim = self.dims[name]
        part = jax.lax.psum_scatter(g, "fsdp", scatter_dimension=dim, tiled=True)
        return part.astype(jnp.float32)

    def _loss_of(self, gathered: Callable[[str, jax.Array], jax.Array]) -> LossOf:
        case, way = self.case, self.way
        if case.model == "resnet":
            return lambda p, x, y: jax_resnet.loss(
                case, {n: gathered(n, a) for n, a in p.items()}, x, y
            )
        model, attend = transformer(case), attention(way.attention)
        last = chunked_loss if way.loss == "chunked" else whole_loss

        def block(p: Tree, x: jax.Array) -> jax.Array:
            named = {n.rpartition("/")[2]: gathered(n, a) for n, a in p.items()}
            return model.block(named, x, attend)

        if way.recompute != "no":
            policies = jax.checkpoint_policies
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=["qkv"] if way.recompute == "qkv" else [],
                names_which_can_be_offloaded=["qkv"] if way.recompute == "qkv-on-host" else [],
                offload_src="device",
                offload_dst="pinned_host",
            )
            block = jax.checkpoint(block, policy=policy)

        def loss(p: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree]:
            outer = {n: gathered(n, p[n]) for n in model.outer}
            hidden = model.enter(outer, x)
            if way.scan:
                stacked = {n: a for n, a in p.items() if n.startswith("layers.")}
                hidden, _ = jax.lax.scan(lambda h, q: (block(q, h), None), hidden, stacked)
            else:
                for i in range(case.layers):
                    hidden = block(
                        {f"layers.{i}/{n}": p[f"layers.{i}/{n}"] for n in model.layer}, hidden
                    )
            return model.leave(outer, hidden, y, last), {}

        return loss


def _summed_together(small: Tree) -> Tree:
    """The sums of small gradients over all devices, in fp32, by one all-reduce."""
    if not small:
        return {}
    joined = jnp.concatenate([a.astype(jnp.float32).ravel() for a in small.values()])
    ends = np.cumsum([a.size for a in small.values()])[:-1]
    parts = jnp.split(jax.lax.psum(joined, "fsdp"), ends)
    return {n: part.reshape(a.shape) for (n, a), part in zip(small.items(), parts, strict=True)}


def gathered_whole(shard: jax.Array, dim: int | None) -> jax.Array:
    """A parameter of the next step."""
    lean = shard.astype(jnp.bfloat16)
    return lean if dim is None else jax.lax.all_gather(lean, "fsdp", axis=dim, tiled=True)


@jax.named_scope("zero.update")
def _adamw(master: Tree, m: Tree, v: Tree, t: jax.Array, g: Tree, squares: jax.Array) -> Any:
    scale = jnp.minimum(1.0, CLIP / (jnp.sqrt(squares) + 1e-6))
    t, (b1, b2) = t + 1, BETAS
    m = {n: b1 * m[n] + (1 - b1) * scale * a for n, a in g.items()}
    v = {n: b2 * v[n] + (1 - b2) * (scale * a) ** 2 for n, a in g.items()}

    def updated(name: str) -> jax.Array:
        root = jnp.sqrt(v[name] / (1 - b2**t)) + EPSILON
        kept = master[name] * (1 - LEARNING_RATE * WEIGHT_DECAY)
        return kept - LEARNING_RATE * (m[name] / (1 - b1**t)) / root

    return {n: updated(n) for n in g}, m, v, t


def _shapes(case: Case, way: Way) -> tuple[dict[str, Any], dict[str, Any]]:
    if case.model == "resnet":
        return jax_resnet.shapes(case)
    model = transformer(case)
    shapes = dict(model.outer)
    if way.scan:
        shapes |= {f"layers./{n}": (case.layers, *s) for n, s in model.layer.items()}
    else:
        shapes |= {f"layers.{i}/{n}": s for i in range(case.layers) for n, s in model.layer.items()}
    return shapes, {}


def _batch(case: Case, devices: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    rows = case.rows * devices
    if case.is_of_images:
        images = jax.ShapeDtypeStruct((rows, 3, case.length, case.length), jnp.bfloat16)
        return images, jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((rows, case.length), jnp.int32)
    return tokens, tokens
