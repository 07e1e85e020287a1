"""Finds the module that traced an operation, and the cost of each module's operations."""

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spmdzero.backend import programs
from spmdzero.hlo import Matmul

# torch_xla appends a number to each scope.
_MODULE = re.compile(r"\bmodule/([^/]*)\.\d+/")
_EITHER = re.compile(r"\bmodule(?:_backward)?/([^/]*)\.\d+/")


@contextlib.contextmanager
def module_scopes(model: nn.Module) -> Iterator[None]:
    """Makes forward calls inside the context leave module names in the program's `op_name`.

    Operations that backward recomputes get no names, as they are part of the cost of backward.
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
    """The innermost module that traced an operation; ``""`` for the model, None for no module."""
    found = _MODULE.findall(op_name)
    return found[-1] if found else None


def traced_in(op_name: str) -> str | None:
    """Does what `module_of` does, also for backward's operations while `backward_scopes` was on."""
    found = _EITHER.findall(op_name)
    return found[-1] if found else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """One module, including its submodules.

    Attributes:
        name: its dotted name, ``""`` for the model.
        kind: name of its class.
        params: number of elements of its parameters.
        macs: multiply-accumulate operations of its forward, on one device in one micro-batch.
    """

    name: str
    kind: str
    params: int
    macs: int

    @property
    def depth(self) -> int:
        """The depth of the module: 0 for the model, 1 for its children."""
        return self.name.count(".") + 1 if self.name else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The matrix multiplications and convolutions of one micro-batch on one device.

    Attributes:
        modules: the model and every module in it, parents first.
        other_macs: multiply-accumulate operations of backward (including recomputation), of a loss
            outside of the model and of the update; 0 for a forward alone.
    """

    modules: tuple[ModuleProfile, ...]
    other_macs: int

    @classmethod
    def of(cls, model: nn.Module, matmuls: Iterable[Matmul]) -> "ModelProfile":
        """The profile of a program that was traced under `module_scopes(model)`."""
        own: Counter[str | None] = Counter()
        for matmul in matmuls:
            own[module_of(matmul.op_name)] += matmul.macs
        modules = tuple(
            ModuleProfile(
                name=name,
                kind=type(module).__name__,
                params=sum(parameter.numel() for parameter in module.parameters()),
                macs=sum(macs for inner, macs in own.items() if _within(inner, name)),
            )
            for name, module in model.named_modules()
        )
        return cls(modules=modules, other_macs=own[None])

    @property
    def params(self) -> int:
        """Number of elements of all parameters."""
        return self.modules[0].params

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of the forward of one micro-batch on one device."""
        return self.modules[0].macs

    @property
    def flops(self) -> int:
        """Floating-point operations of that forward: two for each multiply-accumulate."""
        return 2 * self.macs


def _within(inner: str | None, name: str) -> bool:
    return inner is not None and (not name or inner == name or inner.startswith(name + "."))
