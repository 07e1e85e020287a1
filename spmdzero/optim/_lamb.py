"""LAMB."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdzero.config import OPTIMIZERS
from spmdzero.optim._rule import Named, Terms, Updated, UpdateRule, decay_rates


@dataclass(frozen=True, kw_only=True)
class Lamb(UpdateRule):
    """LAMB (arXiv 1904.00962, algorithm 2) as DeepSpeed's FusedLamb computes it.

    The trust ratio, ``|param| / |update|`` limited to `min_coeff` and `max_coeff`, is that of the
    whole parameter, however it is sharded. Bias correction scales the step, not the moments
    (DeepSpeed, csrc/lamb/fused_lamb_cuda_kernel.cu).

    Attributes:
        bias_correction: whether to multiply lr by ``sqrt(1 - beta2 ** step) / (1 - beta1 **
            step)``.
        eps_inside_sqrt: whether to add eps to the second moment, not to its root.
    """

    parameters = OPTIMIZERS["Lamb"]
    not_in_groups = ("eps_inside_sqrt",)
    bias_correction: bool
    eps_inside_sqrt: bool

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of the running means of the gradient and of its square."""
        return ("exp_avg", "exp_avg_sq")

    @property
    def fixed(self) -> dict[str, Any]:
        """The choices that are part of the compiled update."""
        return {"bias_correction": self.bias_correction}

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The group's hyperparameters, and the rates derived from the betas."""
        names = ("lr", "eps", "weight_decay", "max_coeff", "min_coeff")
        numbers = {name: float(group[name]) for name in names}
        return numbers | decay_rates(group, logarithms=True)

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """The step size before the trust ratio, and the other factors."""
        factors = dict(hyper)
        logs = factors.pop("log_beta1"), factors.pop("log_beta2")
        if self.bias_correction:
            # This is 1 - beta ** step, exact to the last digit of fp32 even at step 1.
            correction1, correction2 = (-torch.expm1(step * log) for log in logs)
            factors["lr"] = hyper["lr"] * correction2.sqrt() / correction1
        return factors

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        factors, keep = terms.factors, terms.keep
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean = keep(mean * factors["beta1"] + grad * factors["one_minus_beta1"], mean)
        new = square * factors["beta2"] + grad * grad * factors["one_minus_beta2"]
        square = keep(new, square)
        if self.eps_inside_sqrt:
            denom = (square + factors["eps"]).sqrt()
        else:
            denom = square.sqrt() + factors["eps"]
        change = mean / denom + param * factors["weight_decay"]
        weight_norm = terms.whole.sum(param * param).sqrt()
        change_norm = terms.whole.sum(change * change).sqrt()
        ratio = (weight_norm / change_norm).minimum(factors["max_coeff"])
        ratio = ratio.maximum(factors["min_coeff"])
        no_ratio = (weight_norm == 0) | (change_norm == 0)
        ratio = torch.where(no_ratio, torch.ones_like(ratio), ratio)
        new = param - change * (factors["lr"] * ratio)
        return new, {"exp_avg": mean, "exp_avg_sq": square}
