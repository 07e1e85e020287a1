"""Walks of autograd's graph."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def nodes_behind(tensor: torch.Tensor, *, ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Each node of autograd's graph behind `tensor`, once.

    Args:
        tensor: where the walk begins.
        ends: says whether to leave out a node and what is behind it.
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
        waiting += [before for before, _ in node.next_functions]


def is_transforming() -> bool:
    """Whether torch.func traces the running code (`grad`, `vmap`, `jacrev` and their like)."""
    return torch._C._are_functorch_transforms_active()


def hands_over(*, some: bool = False) -> bool:
    """Whether the running backward pass returns gradients, as `torch.autograd.grad` does.

    A pass that adds gradients to `.grad` reaches every leaf. Call this in the backward of a node,
    or in a hook.

    Args:
        some: also true for a pass that adds to the `.grad` of only some of the leaves behind the
            node, as with `inputs=`.
    """
    node = torch._C._current_autograd_node()
    if node is None or hasattr(node, "variable"):
        return node is not None and not _reached(node)
    # Those of a folded forward are its parameters.
    further = []
    for each, _ in node.next_functions:
        if hasattr(each, "variable"):
            reached = _reached(each)
            if not (some and reached):
                return not reached
        else:
            further.append(each)
    behind = itertools.chain.from_iterable(_behind(each, lambda _: False) for each in further)
    more = (each for each in behind if hasattr(each, "variable"))
    return not all(map(_reached, more if some else itertools.islice(more, 1)))


def _reached(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        # The pass returns the gradient of this leaf.
        return False
