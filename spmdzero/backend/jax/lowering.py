"""Lowers programs of tensors without compiling them: see `spmdzero.backend.Lowering`."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.forms._tree import mapped
from spmdzero.backend.forms._work import Product, Work
from spmdzero.backend.jax import arrays, runtime
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.graph._donation import Arranged, arranged
from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.graph._graph import in_order
from spmdzero.backend.jax.graph._operations import AtenOp
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._values import Node, Space, Value
from spmdzero.backend.jax.lazy._writes import write
from spmdzero.backend.jax.ops import jax_dtype
from spmdzero.backend.replica._work_counter import product_of


def lowered(tensors: Sequence[torch.Tensor]) -> Any:
    """JAX's lowered program that computes `tensors`, for `runtime.program_platform`."""
    ready = _arranged(_pending(tensors))
    platform = runtime.program_platform()
    return compilations.lower(
        ready.graph,
        [leaf.array for leaf in ready.leaves],
        donated=ready.donated,
        shardings=ready.shardings,
        mesh=ready.mesh,
        platform=None if platform == runtime.platform() else platform,
    )


def returned(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices of those of `tensors` that these programs return: pending ones, each once."""
    pending = _pending(tensors)
    places = list(pending)
    return [places[number] for number in _arranged(pending).order]


def _pending(tensors: Sequence[torch.Tensor]) -> dict[int, Value]:
    """Maps indices in `tensors` to pending values, each value once."""
    found: dict[int, tuple[int, Value]] = {}
    for place, value in enumerate(map(value_of, tensors)):
        if value.pending:
            found.setdefault(id(value), (place, value))
    return dict(found.values())


def _arranged(pending: dict[int, Value]) -> Arranged:
    return arranged([*pending.values()], compilations.mesh)


def annotated(tensors: Sequence[torch.Tensor]) -> bytes:
    """The program that computes `tensors`, as the compiler receives it."""
    bytecode = io.BytesIO()
    # The bytecode has the lines and scopes of operations as the module has them.
    lowered(tensors).compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    return bytecode.getvalue()


class Placeholders:
    """Tensors without data, from which programs can be traced, but not run."""

    def __init__(self) -> None:
        self._counted: set[Node] = set()

    def stand_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes each tensor an input of later traces, sharded as its value was.

        Its pending operations are dropped.
        """
        for tensor in tensors:
            value = value_of(tensor)
            sharding = arrays.sharding_in_jax(value)
            if sharding is None:
                sharding = NamedSharding(compilations.mesh, PartitionSpec())
            with wide_numbers():
                form = jax.ShapeDtypeStruct(value.shape, jax_dtype(value.dtype), sharding=sharding)
            empty = Value(value.shape, value.dtype, Space.GLOBAL, array=form, stand_in=True)
            write(tensor, empty)

    def program(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """The pending program that computes `outputs`."""
        return annotated(outputs)

    def work_outside(self, outputs: Sequence[torch.Tensor]) -> Work:
        """See `spmdzero.backend.Placeholders`."""
        flops, unknown, known = 0.0, dict[str, None](), set[int]()
        for value in _pending(outputs).values():
            for node in in_order(value, known):
                known.add(id(node))
                # What an earlier program would have computed is pending still.
                if node in self._counted or not _is_outside(node):
                    continue
                self._counted.add(node)
                product = _product(node)
                if isinstance(product, Product):
                    flops += product.flops
                elif product is not None:
                    unknown[product] = None
        return Work(flops=flops / compilations.mesh.size, unknown=tuple(unknown))


def _is_outside(node: Node) -> bool:
    """Whether a node is one of torch's operations that neither a region nor an update has."""
    own = any(name.startswith("zero.") for name in node.scope)
    return node.space is Space.GLOBAL and isinstance(node.op, AtenOp) and not own


def _product(node: Node) -> Product | str | None:
    assert isinstance(node.op, AtenOp)
    packet, _, overload = node.op.name.removeprefix("aten.").rpartition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload)
    args, kwargs = mapped((node.args, dict(node.kwargs)), Value, _empty)
    made = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in node.forms]
    return product_of(func, args, kwargs, made[0] if made else None)


def _empty(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def placeholders() -> Placeholders:
    """A new `Placeholders`, which has no tensors yet."""
    return Placeholders()
