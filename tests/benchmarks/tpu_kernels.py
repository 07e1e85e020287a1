"""What attention's windows, soft caps and sinks take on a TPU, and products of experts.

Each operation with its gradients is compiled by libtpu for one chip, which need not be here, and
timed as `spmdzero explain` times a step: by libtpu's cycles, and kernels by a model of their
products and bytes.

    python tests/benchmarks/tpu_kernels.py attention
    python tests/benchmarks/tpu_kernels.py experts
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from harness.report import markdown

from spmdzero.explain import Topology, step_time

CHIPS = ("v5e", "v6e")
LENGTH = 8192
"""Tokens of a row; a chip has one row."""
_LONGEST = 60
"""Seconds; libtpu writes the largest number there is beside what it can't estimate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """A layer's attention, causal.

    Attributes:
        name: of a model that has it.
        heads, kv_heads, size: the heads, and the width of one.
        window: tokens that a query sees.
        more: what `Form` says besides.
    """

    name: str
    heads: int
    kv_heads: int
    size: int
    window: int
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


LAYERS = (
    Attention(name="Mistral 7B", heads=32, kv_heads=8, size=128, window=4096),
    Attention(name="the same", heads=32, kv_heads=8, size=128, window=2048),
    Attention(name="the same", heads=32, kv_heads=8, size=128, window=1024),
    Attention(
        name="Gemma 2 9B, a cap of 50", heads=16, kv_heads=8, size=256, window=4096,
        more={"soft_cap": 50.0},
    ),
    Attention(
        name="gpt-oss 20B, sinks", heads=64, kv_heads=8, size=64, window=128, more={"sinks": True}
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The first product of a layer of experts.

    Attributes:
        name: of a model that has it.
        rows: tokens times the experts that each goes through.
        inner, outer, groups: the lengths of an expert's matrix, and the number of experts.
    """

    name: str
    rows: int
    inner: int
    outer: int
    groups: int


MIXTURES = (
    Experts(name="Qwen3-MoE 30B", rows=8 * LENGTH, inner=2048, outer=1536, groups=128),
    Experts(name="Mixtral 8x7B", rows=2 * LENGTH, inner=4096, outer=28672, groups=8),
)


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("attention", "experts"))
    parser.add_argument("--chip", choices=CHIPS, action="append")
    told = parser.parse_args()
    for chip in told.chip or CHIPS:
        table = (attention if told.what == "attention" else experts)(chip)
        print(f"\n{chip}, milliseconds:\n\n{table}", flush=True)


def attention(chip: str) -> str:
    """The table of `LAYERS`: forward and backward of one row."""
    rows = [
        [
            f"{layer.name}, {layer.heads} heads of {layer.size}",
            f"{layer.window:,}",
            _by_kernel(layer, chip, window=layer.window, mask=None),
            _by_kernel(layer, chip, window=None, mask=None),
            _by_kernel(layer, chip, window=None, mask="bool"),
            _milliseconds(_plain(layer), _tensors(layer), chip),
        ]
        for layer in LAYERS
    ]
    titles = ["", "window", "its blocks alone", "no window", "the window as a mask", "plain"]
    return markdown(titles, rows)


def _tensors(layer: Attention) -> list[Any]:
    """Query, key, value and the gradient of the output, without values."""
    import jax

    heads = (layer.heads, layer.kv_heads, layer.kv_heads, layer.heads)
    return [jax.ShapeDtypeStruct((1, h, LENGTH, layer.size), "bfloat16") for h in heads]


def _by_kernel(layer: Attention, chip: str, *, window: int | None, mask: str | None) -> str:
    import jax

    from spmdzero.backend.attention import Form, jax_function

    shape = (1, 1, LENGTH, LENGTH) if mask else ()
    form = Form(
        batch=1, heads=layer.heads, kv_heads=layer.kv_heads, q_length=LENGTH, kv_length=LENGTH,
        kv_used=LENGTH, head_dim=layer.size, value_dim=layer.size, dtype="bfloat16",
        causal=mask is None, window=window, mask=mask, mask_shape=shape, platform="tpu",
        **layer.more,
    )  # fmt: skip

    def both(*arrays: Any) -> Any:
        *given, grad = arrays
        ways = [
            jax.named_scope(f"attention.{way}{form.scope}")(jax_function(way, form))
            for way in ("forward", "backward")
        ]
        made = ways[0](*given)
        return made[0], *ways[1](*given, *made, grad)

    *tensors, grad = _tensors(layer)
    sinks = [jax.ShapeDtypeStruct((1, layer.heads, 1, 1), "float32")] * form.sinks
    masks = [jax.ShapeDtypeStruct(shape, "bool")] * bool(mask)
    return _milliseconds(both, [*tensors, *masks, *sinks, grad], chip)


def _plain(layer: Attention) -> Callable[..., Any]:
    """By products of all pairs; sinks are left out."""
    import jax
    import jax.numpy as jnp

    def weighted(q: Any, k: Any, v: Any) -> Any:
        grouped = q.reshape(1, layer.kv_heads, -1, LENGTH, layer.size)
        scores = jnp.einsum("bhgqd,bhkd->bhgqk", grouped, k).astype(jnp.float32)
        if cap := layer.more.get("soft_cap"):
            scores = cap * jnp.tanh(scores / cap)
        away = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
        scores = jnp.where((away >= 0) & (away < layer.window), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bhgqk,bhkd->bhgqd", weights, v).reshape(q.shape)

    @jax.named_scope("attention.both")
    def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
        out, back = jax.vjp(weighted, q, k, v)
        return out, *back(grad)

    return both


def experts(chip: str) -> str:
    """The table of `MIXTURES`: a product, and the gradients of its rows and of its weights."""
    rows = []
    for mixture in MIXTURES:
        name = f"{mixture.name}, {mixture.groups} experts of {mixture.inner} x {mixture.outer}"
        for who, ways in (("kernels", _kernels(mixture)), ("`ragged_dot`", _ragged(mixture))):
            rows.append([f"{name}: {who}", *(_milliseconds(*way, chip) for way in ways)])
    return markdown(["", "product", "gradient of rows", "gradient of weights"], rows)


def _of_experts(mixture: Experts) -> tuple[Any, Any, Any, Any]:
    """Rows, weights as transformers holds them, gradients and each group's end, no values."""
    import jax

    rows, inner, outer, groups = mixture.rows, mixture.inner, mixture.outer, mixture.groups
    shapes = ((rows, inner), (groups, outer, inner), (rows, outer))
    return (
        *(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes),
        jax.ShapeDtypeStruct((groups,), "int32"),
    )


def _kernels(mixture: Experts) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    from spmdzero.backend.jax.kernels._grouped_kernels import Form, grouped

    rows, weights, grads, ends = _of_experts(mixture)
    fields = {"rows": mixture.rows, "groups": mixture.groups, "dtype": "bfloat16"}
    there = {**fields, "inner": mixture.inner, "outer": mixture.outer}
    back = {**fields, "inner": mixture.outer, "outer": mixture.inner}
    yield grouped(Form(**there, transposed=True)), [rows, weights, ends]
    yield grouped(Form(**back)), [grads, weights, ends]
    yield grouped(Form(**back, summed=True)), [grads, rows, ends]


def _ragged(mixture: Experts) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    import jax

    rows, weights, grads, counts = _of_experts(mixture)

    def by_rows(x: Any, w: Any, counts: Any, *, dim: int) -> Any:
        dims = jax.lax.RaggedDotDimensionNumbers((((1,), (dim,)), ((), ())), [0], [0])
        return jax.lax.ragged_dot_general(x, w, counts, dims)

    def summed(x: Any, g: Any, counts: Any) -> Any:
        dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return jax.lax.ragged_dot_general(x, g, counts, dims)

    yield lambda x, w, counts: by_rows(x, w, counts, dim=2), [rows, weights, counts]
    yield lambda g, w, counts: by_rows(g, w, counts, dim=1), [grads, weights, counts]
    yield summed, [grads, rows, counts]


def _milliseconds(function: Callable[..., Any], arguments: list[Any], chip: str) -> str:
    """The time of the program that libtpu makes of it for one chip, or that it doesn't fit."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    topology = Topology.parse(f"{chip}:2x2")
    found = topologies.get_topology_desc(topology_name=topology.slice_name, platform="tpu")
    here = SingleDeviceSharding(found.devices[0])
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in arguments]
    try:
        compiled = jax.jit(function).lower(*given).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return "doesn't fit"
    time = step_time([(compiled.as_text(), 1)], topology.chip, target=topology.name)
    if time.seconds > _LONGEST:
        return "no estimate"
    digits = max(1, 2 - math.floor(math.log10(1e3 * time.seconds)))
    return f"{1e3 * time.seconds:.{digits}f}"


if __name__ == "__main__":
    from spmdzero.explain._aot import _ENVIRONMENT

    os.environ.update(_ENVIRONMENT)
    main()
