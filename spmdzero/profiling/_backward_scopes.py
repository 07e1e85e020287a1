"""Scopes that give a backward's operations the names of the modules whose forward they undo."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spmdzero.backend import map_tensors, programs

# Autograd's number of leaves' nodes, the largest one: no module's call has made them.
_LEAF = 2**64 - 1


@contextlib.contextmanager
def backward_scopes(model: nn.Module) -> Iterator[None]:
    """Makes backwards of calls inside the context leave module names in the program's `op_name`.

    When a call of a module ends, each autograd node that it made gets a hook that opens a scope
    before the node runs, and a hook that closes the scope afterwards. The hooks compute nothing.
    Operations that backward recomputes belong to the node that asked for them.
    """
    names = {module: name for name, module in model.named_modules()}
    # Numbers at which calls began: autograd numbers its nodes in the order of their creation.
    began: list[int] = []
    # Numbers instead of nodes, since a kept node would keep its saved tensors.
    named: set[int] = set()
    opened: list[contextlib.ExitStack] = []

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            began.append(torch.autograd._get_sequence_nr())

    def leave(module: nn.Module, _: Any, made: Any) -> None:
        if module in names:
            for node in _made_since(began.pop(), made):
                # A node that an inner module has made already has the inner module's name.
                number = node._sequence_nr()  # type: ignore[missing-attribute]
                if number not in named:
                    named.add(number)
                    _open_while_running(node, f"module_backward/{names[module]}", opened)

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        while opened:
            # A node that failed has left its scope open.
            opened.pop().close()


def _made_since(first: int, made: Any) -> Iterable[Node]:
    """The nodes with a number from `first` on from which the tensors of `made` come."""
    found: set[Node] = set()
    pending: list[Node | None] = []
    map_tensors(made, lambda _, tensor: pending.append(tensor.grad_fn) or tensor)
    while pending:
        node = pending.pop()
        if node is None or node in found:
            continue
        number = node._sequence_nr()  # type: ignore[missing-attribute]
        if first <= number < _LEAF:
            found.add(node)
            pending += [following for following, _ in node.next_functions]
    return found


def _open_while_running(node: Node, name: str, opened: list[contextlib.ExitStack]) -> None:
    def open_scope(_: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(programs.scope(name))
        opened.append(stack)

    def close_scope(_: Any, __: Any) -> None:
        opened.pop().close()

    node.register_prehook(open_scope)
    node.register_hook(close_scope)
