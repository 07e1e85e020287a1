"""Adam and AdamW."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdzero.config import OPTIMIZERS
from spmdzero.optim._rule import (
    Named,
    Slot,
    Terms,
    Updated,
    UpdateRule,
    coded_slots,
    decay_rates,
)


@dataclass(frozen=True, kw_only=True)
class Adam(UpdateRule):
    """Adam (arXiv 1412.6980, algorithm 1) or AdamW (arXiv 1711.05101, algorithm 2).

    Attributes:
        decoupled: whether it is AdamW, whose decay acts on the weights; Adam adds it to the
            gradient.
        bias_correction: whether to divide the moments by `1 - beta ** step`.
        eight_bits_from: the least elements of a parameter whose moments rest in 8 bits, None for
            no such parameter.
    """

    parameters = OPTIMIZERS["Adam"]
    not_in_groups = ("adam_w_mode", "torch_adam", "amsgrad")
    decoupled: bool
    bias_correction: bool
    eight_bits_from: int | None = None

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of the running means of the gradient and of its square."""
        return ("exp_avg", "exp_avg_sq")

    def slots_of(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """Both slots, in 8 bits where the parameter is large enough."""
        return coded_slots(self.slots, shape, least=self.eight_bits_from)

    @property
    def fixed(self) -> dict[str, Any]:
        """The choices that are part of the compiled update."""
        return {"bias_correction": self.bias_correction, "decoupled_weight_decay": self.decoupled}

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """lr, eps, the decay, and the rates derived from the betas."""
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        rates = decay_rates(group, logarithms=True)
        del rates["beta1"]
        decay = lr * weight_decay if self.decoupled else weight_decay
        return {"lr": lr, "eps": float(group["eps"]), "decay": decay, **rates}

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """The step size and the factors of both moments."""
        factors = {
            name: hyper[name]
            for name in ("eps", "decay", "one_minus_beta1", "one_minus_beta2", "beta2")
        }
        if not self.bias_correction:
            return factors | {"step_size": hyper["lr"]}
        # This is 1 - beta ** step, which computed literally has 4 right digits in fp32 at step 1.
        correction1 = -torch.expm1(step * hyper["log_beta1"])
        correction2 = -torch.expm1(step * hyper["log_beta2"])
        return factors | {
            "step_size": hyper["lr"] / correction1,
            "correction2_sqrt": correction2.sqrt(),
        }

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        factors, keep = terms.factors, terms.keep
        if not self.decoupled:
            grad = grad + param * factors["decay"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean = keep(mean + (grad - mean) * factors["one_minus_beta1"], mean)
        new = square * factors["beta2"] + grad * grad * factors["one_minus_beta2"]
        square = keep(new, square)
        denom = square.sqrt()
        if self.bias_correction:
            denom = denom / factors["correction2_sqrt"]
        change = mean / (denom + factors["eps"]) * factors["step_size"]
        if self.decoupled:
            # In fp32 multiplying by (1 - lr * weight_decay) would make a decay of 1e-6 too strong
            # by 1.3 %, for every parameter.
            change = change + param * factors["decay"]
        return param - change, {"exp_avg": mean, "exp_avg_sq": square}
