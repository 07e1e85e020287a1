"""Names of modules on the operations that their forward traces."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spmdzero.backend import programs

# torch_xla appends a number to each scope.
_MODULE = re.compile(r"\bmodule/([^/]*)\.\d+/")


@contextlib.contextmanager
def module_scopes(model: nn.Module) -> Iterator[None]:
    """Forward calls of the model's modules inside leave their names in the program's `op_name`.

    Not what backward recomputes: that is part of the cost of backward.
    """
    names = {module: name for name, module in model.named_modules()}
    open_scopes: list[contextlib.ExitStack] = []

    def enter(module: nn.Module, _: Any) -> None:
        if module in names and not _in_backward():
            stack = contextlib.ExitStack()
            stack.enter_context(programs.scope(f"module/{names[module]}"))
            open_scopes.append(stack)

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if module in names and not _in_backward():
            open_scopes.pop().close()

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def module_of(op_name: str) -> str | None:
    """The innermost module that traced an operation; ``""`` is the model, None is no module."""
    found = _MODULE.findall(op_name)
    return found[-1] if found else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
