"""A called block, and its trace."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmdzero.backend.forms._tree import Skeleton
from spmdzero.backend.jax.scan._parts import Form
from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.pure import same_constants


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A block and the arguments of its call.

    Attributes:
        module: the block, with the replica's parameters.
        name: of the block and its equals, with a star for the number.
        call: runs the module, in the place of its own call.
        args, kwargs: the arguments after the first one.
        x: shape and dtype of the first argument.
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
        """Parameters by name."""
        return dict(self.module.named_parameters())

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return self.parameters | dict(self.module.named_buffers())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Body:
    """A traced block.

    The inputs of `forward` are x, the tensors shared by all blocks, the replica's number, the
    block's parameters and buffers, the keys of its draws, and its uploads. It returns y and the
    saved tensors. The inputs of `backward` are the same up to the buffers, then dy, the gradient so
    far of each of `shared`, the keys, the uploads, and the saved products. It returns dx, the
    gradients of `shared` with those so far added, and the gradients of `trained`. Of a parameter in
    `sharded` both take this device's shard, and `backward` returns this device's part of the sum of
    its gradients over replicas.

    Attributes:
        output: the block's output without its tensor.
        draws: number of keys that it draws.
        uploads: CPU tensors that it uploads.
        saves_x: whether its backward needs x.
        on_host: of x, if it is needed, and of `saved`, whether it rests in the host's memory.
        saved: numbers of the products that its backward needs.
        forms: the forms of these products.
        shared: indices of the shared inputs that have a gradient.
        trained: names of the parameters that have a gradient.
        gradients: the forms of these gradients.
        sharded: names of the parameters that the block gathers itself.
    """

    forward: FoldedFunction
    backward: FoldedFunction | None
    output: Skeleton
    draws: int
    uploads: tuple[torch.Tensor, ...]
    saves_x: bool = False
    on_host: tuple[bool, ...] = ()
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
            and same_constants(_constants(self), _constants(other))
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
