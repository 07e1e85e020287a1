"""Muon."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from spmdzero.config import OPTIMIZERS
from spmdzero.optim._newton_schulz import aspect_scale, gather_dtype, orthogonalize
from spmdzero.optim._rule import Named, Terms, Updated, UpdateRule, WholeTensor


@dataclass(frozen=True, kw_only=True)
class Muon(UpdateRule):
    """Muon (https://kellerjordan.github.io/posts/muon) as DeepSpeed's ZeRO-1/2 computes it.

    Nesterov momentum, then the orthogonalised update takes the gradient's place: the global norm
    and the clipping see it, not the gradient (DeepSpeed, runtime/zero/stage_1_and_2.py,
    `get_flat_partition`). With gradient_clipping below that norm, usually far above 1, clipping
    therefore scales every update; it is DeepSpeed's meaning and kept.

    Costs one gather of the update per parameter, in bf16 ("standard") or fp32 ("gram"); each
    device then orthogonalises the whole matrix.

    Attributes:
        ns_method: the Newton-Schulz iteration, see `orthogonalize`.
    """

    parameters = OPTIMIZERS["Muon"]
    ns_method: Literal["gram", "standard"]

    @property
    def slots(self) -> tuple[str, ...]:
        """The momentum."""
        return ("momentum_buffer",)

    @property
    def defaults(self) -> dict[str, Any]:
        """MuonWithAuxAdam's (DeepSpeed, runtime/zero/muon/original_muon.py)."""
        return {
            "lr": 0.02,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "ns_method": self.ns_method,
            "use_muon": True,
        }

    @property
    def fixed(self) -> dict[str, Any]:
        """What the compiled update has no other of."""
        return {"ns_method": self.ns_method}

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """lr, the decay of a step, and the momentum with its complement."""
        return {
            "lr": float(group["lr"]),
            "decay": float(group["lr"]) * float(group["weight_decay"]),
            "momentum": float(group["momentum"]),
            "one_minus_momentum": 1.0 - float(group["momentum"]),
        }

    def direction(self, grad: Tensor, state: Named, hyper: Named, whole: WholeTensor) -> Updated:
        """The orthogonalised momentum, and the new momentum."""
        buffer = state["momentum_buffer"]
        buffer = buffer + (grad - buffer) * hyper["one_minus_momentum"]
        ahead = grad + (buffer - grad) * hyper["momentum"]
        matrix = whole.gather(ahead.to(gather_dtype(self.ns_method)))
        if matrix.dim() == 4:  # a convolution's filters, one a row
            matrix = matrix.flatten(1)
        scale = aspect_scale(*whole.shape[-2:])
        update = orthogonalize(matrix, method=self.ns_method) * scale
        stored = whole.store(update.reshape(whole.shape)).to(grad.dtype)
        return stored, {"momentum_buffer": buffer}

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """One step of one parameter along `grad`, which is what `direction` returned."""
        return param - (grad * terms.factors["lr"] + param * terms.factors["decay"]), dict(state)
