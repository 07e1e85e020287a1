"""A block as it is called, and what was traced of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmdzero.backend._current import compiler
from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.scan._parts import Form


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A block as it is called.

    Attributes:
        module: its parameters are the replica's.
        name: of it and its equals, with a star for the number.
        call: runs it, in the place of its own call.
        args, kwargs: what it is given after its first argument.
        x: shape and dtype of that.
        saves: whether products are kept for the backward, which otherwise computes all again.
    """

    module: nn.Module
    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: Form
    saves: bool

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """By name."""
        return dict(self.module.named_parameters())

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return self.parameters | dict(self.module.named_buffers())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Body:
    """A traced block.

    The inputs of `forward` are x, what is shared by all blocks, the replica's number, the block's
    parameters and buffers; then come the keys of its draws, and what it uploads. It returns y, and
    what is saved. Those of `backward` are the same and then dy, one gradient for each of `shared`
    so far, the keys, the uploads, and the saved products. It returns dx, the gradients of `shared`
    with what came in, and those of `trained`. Of a parameter in `sharded` both take the device's
    shard, and `backward` returns the device's part of its gradient's sum over replicas.

    Attributes:
        output: the form of what the block returns.
        draws: keys that it draws.
        uploads: values on the CPU that it uploads.
        saves_x: whether its backward needs x.
        saved: the products that its backward needs, by number.
        forms: of these.
        shared: of the shared inputs those that have a gradient.
        trained: the parameters that have one.
        gradients: the forms of theirs.
        sharded: the parameters that the block gathers itself.
    """

    forward: FoldedFunction
    backward: FoldedFunction | None
    output: Any
    draws: int
    uploads: tuple[torch.Tensor, ...]
    saves_x: bool = False
    saved: tuple[int, ...] = ()
    forms: tuple[Form, ...] = ()
    shared: tuple[int, ...] = ()
    trained: tuple[str, ...] = ()
    gradients: tuple[Form, ...] = ()
    sharded: tuple[str, ...] = ()

    def is_same(self, other: "Body") -> bool:
        """Whether two blocks compute the same."""
        return (
            _program(self) == _program(other)
            and all(
                one.dtype == another.dtype and torch.equal(one, another)
                for one, another in zip(self.uploads, other.uploads, strict=True)
            )
            and all(
                compiler.same_value(one.tensor, another.tensor)
                for one, another in zip(_constants(self), _constants(other), strict=True)
            )
        )


def _constants(body: Body) -> list[Any]:
    functions = [f for f in (body.forward, body.backward) if f is not None]
    return [constant for function in functions for constant in function.constants]


def _program(body: Body) -> tuple[Any, ...]:
    functions = [f for f in (body.forward, body.backward) if f is not None]
    return (
        *((f.proto, f.arrangement) for f in functions),
        *(body.output, body.draws, len(body.uploads), body.saves_x, body.saved, body.forms),
        *(body.shared, body.trained, body.gradients, body.sharded),
    )
