"""Groups values by mesh: where engines have several, no program computes values of two."""

from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

from spmdzero.backend.jax.graph._graph import Folded, Step, in_order
from spmdzero.backend.jax.lazy._values import Value


def by_mesh(roots: Iterable[Value], latest: Mesh) -> list[list[Value]]:
    """The pending values of each mesh; those that come from none are with `latest`'s.

    Args:
        roots: pending values.
        latest: the mesh of the engine that was made last.
    """
    of_node: dict[int, Mesh | None] = {}
    found: dict[Mesh, list[Value]] = {}
    for root in roots:
        for node in in_order(root, of_node):
            before = (of_node[id(v.node)] for v in node.values if v.node is not None)
            of_node[id(node)] = _own(node.op) or next(filter(None, before), None)
        found.setdefault(of_node[id(root.node)] or latest, []).append(root)
    return list(found.values())


def mesh_of(steps: Iterable[Step], default: Mesh) -> Mesh:
    """The mesh of the operations that have one; `default` if none has."""
    return next(filter(None, (_own(step.op) for step in steps)), default)


def _own(op: Any) -> Mesh | None:
    """The mesh of an operation; of a folded one that of its operations."""
    if isinstance(op, Folded):
        return next(filter(None, (_own(step.op) for step in op.graph.steps)), None)
    return getattr(op, "mesh", None)
