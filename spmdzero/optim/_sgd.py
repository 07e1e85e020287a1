"""Stochastic gradient descent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdzero.config import OPTIMIZERS
from spmdzero.optim._rule import Named, Terms, Updated, UpdateRule


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """SGD with torch.optim.SGD's meaning of momentum, dampening and Nesterov.

    Attributes:
        momentum: whether there is a momentum buffer; the group has the amount of momentum.
        nesterov: whether to look ahead along the buffer (needs `momentum`).
    """

    parameters = OPTIMIZERS["SGD"]
    momentum: bool
    nesterov: bool

    @property
    def slots(self) -> tuple[str, ...]:
        """The slot of the momentum buffer, if there is one."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def defaults(self) -> dict[str, Any]:
        """torch's defaults, without `momentum` if the rule has momentum, which has no default."""
        defaults = super().defaults
        if self.momentum:
            del defaults["momentum"]
        return defaults

    @property
    def fixed(self) -> dict[str, Any]:
        """The choices that are part of the compiled update."""
        return {"momentum": self.momentum, "nesterov": self.nesterov}

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """lr and weight decay, and with momentum its two hyperparameters."""
        hyper = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
        if self.momentum:
            hyper["momentum"] = float(group["momentum"])
            hyper["one_minus_dampening"] = 1.0 - float(group["dampening"])
        return hyper

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """The factors, with the gradient's weight in the buffer, which is 1 at the first step.

        torch starts the buffer as the gradient itself, undamped. Here it starts at zero, so that
        weight 1 at step 1 gives the same buffer without a second graph.
        """
        factors = dict(hyper)
        if self.momentum:
            damped = factors.pop("one_minus_dampening")
            factors["grad_weight"] = torch.where(step == 1, torch.ones_like(damped), damped)
        return factors

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        factors, keep = terms.factors, terms.keep
        grad = grad + param * factors["weight_decay"]
        if not self.momentum:
            return param - grad * factors["lr"], {}
        momentum = factors["momentum"]
        buffer = state["momentum_buffer"]
        buffer = keep(buffer * momentum + grad * factors["grad_weight"], buffer)
        direction = grad + buffer * momentum if self.nesterov else buffer
        return param - direction * factors["lr"], {"momentum_buffer": buffer}
