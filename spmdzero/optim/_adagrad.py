"""Adagrad."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spmdzero.config import OPTIMIZERS
from spmdzero.optim._rule import Named, Terms, Updated, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Adagrad(UpdateRule):
    """Adagrad as in torch.optim.Adagrad, which is DeepSpeed's "Adagrad" (JMLR 12, 2121)."""

    parameters = OPTIMIZERS["Adagrad"]

    @property
    def slots(self) -> tuple[str, ...]:
        """The slot of the sum of the squared gradients."""
        return ("sum",)

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """`initial_accumulator_value`, with which the sum starts."""
        return float(group["initial_accumulator_value"])

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """lr, its decay, eps and weight decay."""
        return {name: float(group[name]) for name in ("lr", "lr_decay", "eps", "weight_decay")}

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """The step size, lr / (1 + (step - 1) * lr_decay)."""
        step_size = hyper["lr"] / (1.0 + (step - 1.0) * hyper["lr_decay"])
        return {
            "step_size": step_size,
            "eps": hyper["eps"],
            "weight_decay": hyper["weight_decay"],
        }

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        factors, keep = terms.factors, terms.keep
        grad = grad + param * factors["weight_decay"]
        total = keep(state["sum"] + grad * grad, state["sum"])
        change = grad / (total.sqrt() + factors["eps"]) * factors["step_size"]
        return param - change, {"sum": total}
