"""Autograd's graph, walked."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def nodes_behind(tensor: torch.Tensor, *, ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Each node of autograd's graph that `tensor` comes from, once.

    Args:
        tensor: where to begin.
        ends: whether to leave a node out, and what is behind it.
    """
    return _behind(tensor.grad_fn, ends)


def _behind(start: Any, ends: Callable[[Any], bool]) -> Iterator[Any]:
    seen: set[Any] = set()
    waiting: list[Any] = [start]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or ends(node):
            continue
        seen.add(node)
        yield node
        waiting += (before for before, _ in node.next_functions)


def is_transforming() -> bool:
    """Whether torch.func traces what runs now (`grad`, `vmap`, `jacrev` and their like)."""
    return torch._C._are_functorch_transforms_active()


def hands_over(*, some: bool = False) -> bool:
    """Whether the backward pass that runs returns gradients, as `torch.autograd.grad` does.

    One that adds them to `.grad` reaches every leaf. Asked in the backward of a node, or by a hook.

    Args:
        some: also of one that adds them to the `.grad` of some leaves behind the node only, as by
            `inputs=`.
    """
    node = torch._C._current_autograd_node()
    leaves = (each for each in _behind(node, lambda _: False) if hasattr(each, "variable"))
    return not all(map(_reached, leaves if some else itertools.islice(leaves, 1)))


def _reached(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        # It is one of the leaves whose gradients are asked for.
        return False
