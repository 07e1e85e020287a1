"""Autograd's graph, walked."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def nodes_behind(tensor: torch.Tensor, *, ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Each node of autograd's graph that `tensor` comes from, once.

    Args:
        tensor: where to begin.
        ends: whether to leave a node out, and what is behind it.
    """
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or ends(node):
            continue
        seen.add(node)
        yield node
        waiting += (before for before, _ in node.next_functions)
