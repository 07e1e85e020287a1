"""The facts that a trace of a block collects."""

from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.backend._current import compiler
from spmdzero.backend.jax.scan._parts import Form


class Run:
    """The facts that a trace of a block collects; `more` holds the inputs that it adds."""

    def __init__(self) -> None:
        self.more: list[torch.Tensor] = []
        self.keys: dict[int, int] = {}
        self.uploads: list[int] = []
        self.hosts: list[torch.Tensor] = []
        self.products: list[Form] = []
        self.anchors: list[int] = []
        self.output: Any = None

    def input(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.more.append(compiler.stand_in(shape, dtype))
        return len(self.more) - 1

    def key(self, value: int) -> torch.Tensor:
        # A block's own checkpointing resets the generator, and draws its keys again.
        if value not in self.keys:
            self.keys[value] = self.input((), torch.int32)
        return self.more[self.keys[value]]

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        for known, place in zip(self.hosts, self.uploads, strict=True):
            if known.dtype == host.dtype and torch.equal(known, host):
                return self.more[place]
        self.hosts.append(host.detach().clone())
        self.uploads.append(self.input(host.shape, host.dtype))
        return self.more[-1]

    def product(self, product: torch.Tensor) -> torch.Tensor:
        self.products.append(Form.of(product))
        self.anchors.append(self.input(product.shape, product.dtype))
        return self.more[-1]
