"""Lion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
class Lion(UpdateRule):
    """Lion (arXiv 2302.06675, algorithm 2).

    Where the interpolation of gradient and momentum is exactly 0, the weight stays unchanged, as in
    the paper; DeepSpeed's kernel adds lr there at every step (csrc/lion/multi_tensor_lion.cu).

    Attributes:
        eight_bits_from: as in `Adam`.
    """

    parameters = OPTIMIZERS["Lion"]
    eight_bits_from: int | None = None

    @property
    def slots(self) -> tuple[str, ...]:
        """The slot of the momentum."""
        return ("exp_avg",)

    def slots_of(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """The slot, in 8 bits where the parameter is large enough."""
        return coded_slots(self.slots, shape, least=self.eight_bits_from)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """lr, the decay of a step, and both betas with their complements."""
        lr = float(group["lr"])
        return {"lr": lr, "decay": lr * float(group["weight_decay"]), **decay_rates(group)}

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        factors, keep = terms.factors, terms.keep
        mean = state["exp_avg"]
        blend = mean * factors["beta1"] + grad * factors["one_minus_beta1"]
        change = blend.sign() * factors["lr"] + param * factors["decay"]
        mean = keep(mean * factors["beta2"] + grad * factors["one_minus_beta2"], mean)
        return param - change, {"exp_avg": mean}
