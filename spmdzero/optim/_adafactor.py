"""Adafactor, whose second moment is a row and a column for each matrix."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdzero.config import Rate, Section
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._rule import Named, Slot, Terms, Updated, UpdateRule, WholeTensor


class AdafactorParams(Section):
    """Parameters of transformers.optimization.Adafactor."""

    lr: Rate | None = None
    eps: Any = (1e-30, 1e-3)
    clip_threshold: Rate = 1.0
    decay_rate: float = -0.8
    beta1: Rate | None = None
    weight_decay: Rate = 0.0
    scale_parameter: bool = True
    relative_step: bool = True
    warmup_init: bool = False


class TorchAdafactorParams(Section):
    """Parameters of torch.optim.Adafactor."""

    lr: Rate = 1e-2
    beta2_decay: float = -0.8
    eps: Any = (None, 1e-3)
    d: Rate = 1.0
    weight_decay: Rate = 0.0


@dataclass(frozen=True, kw_only=True)
class Adafactor(UpdateRule):
    """Adafactor (arXiv 1804.04235, algorithms 4 and 5) as transformers computes it.

    Source: transformers 5.23, optimization.py. A row and a column are means of the gradient's
    squares over the last dim and over the one before; every device holds them whole.

    Attributes:
        scale_parameter: whether lr is relative to the root mean square of a parameter.
        relative_step: whether lr is ``1 / sqrt(step)``, and at most 0.01, in the place of a number.
        warmup_init: whether that starts from 1e-6.
        first_moment: whether there is a running mean of updates, with the group's beta1.
    """

    parameters = AdafactorParams
    scale_parameter: bool
    relative_step: bool
    warmup_init: bool
    first_moment: bool

    @property
    def slots(self) -> tuple[str, ...]:
        """All that a parameter may have: the row and the column, or the elements' own mean."""
        mean = ("exp_avg",) if self.first_moment else ()
        return (*mean, "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")

    def slots_of(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """Row and column of a parameter of two dims or more, else the elements' own mean."""
        mean = (Slot(name="exp_avg"),) if self.first_moment else ()
        if len(shape) < 2:
            return (*mean, Slot(name="exp_avg_sq"))
        row = Slot(name="exp_avg_sq_row", shape=shape[:-1])
        return (*mean, row, Slot(name="exp_avg_sq_col", shape=(*shape[:-2], shape[-1])))

    @property
    def fixed(self) -> dict[str, Any]:
        """The choices that are part of the compiled update."""
        return {
            "scale_parameter": self.scale_parameter,
            "relative_step": self.relative_step,
            "warmup_init": self.warmup_init,
        }

    def validate(self, group: Mapping[str, Any]) -> None:
        """Checks a param group.

        Raises:
            SpmdZeroConfigError: see `check_group`; or the group alone has a beta1, or alone none.
        """
        super().validate(group)
        if (group["beta1"] is not None) != self.first_moment:
            raise SpmdZeroConfigError(
                key="optimizer.params.beta1",
                value=group["beta1"],
                reason="whether there is a first moment is part of the compiled update",
                fix="Give every param group a beta1, or none.",
            )

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The group's numbers; what is None is 0 and has no effect."""
        names = ("clip_threshold", "decay_rate", "weight_decay")
        beta1 = float(group["beta1"] or 0.0)
        eps = tuple(map(float, group["eps"]))
        return {name: float(group[name]) for name in names} | {
            "lr": float(group["lr"] or 0.0),
            "eps": eps[0],
            "least_rms": eps[1],
            "beta1": beta1,
            "one_minus_beta1": 1.0 - beta1,
        }

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """lr, and the weight of the new squares, ``step ** decay_rate``."""
        factors = dict(hyper)
        factors["new"] = torch.exp(step.log() * factors.pop("decay_rate"))
        if self.relative_step:
            most = step * 1e-6 if self.warmup_init else torch.full_like(step, 1e-2)
            factors["lr"] = most.minimum(step.rsqrt())
        return factors

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        factors, whole, keep = terms.factors, terms.whole, terms.keep
        lr, new = factors["lr"], factors["new"]
        if self.scale_parameter:
            lr = lr * _rms(param, whole).maximum(factors["least_rms"])
        squares = grad * grad + factors["eps"]
        if "exp_avg_sq" in state:
            mean = _toward(state["exp_avg_sq"], squares, new, keep)
            kept, change = {"exp_avg_sq": mean}, mean.rsqrt() * grad
        else:
            full = _full(squares, whole)
            row = _toward(state["exp_avg_sq_row"], full.mean(-1), new, keep)
            column = _toward(state["exp_avg_sq_col"], full.mean(-2), new, keep)
            kept = {"exp_avg_sq_row": row, "exp_avg_sq_col": column}
            of_rows = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
            change = _times(grad, of_rows * column.rsqrt().unsqueeze(-2), whole)
        excess = (_rms(change, whole) / factors["clip_threshold"]).clamp(min=1.0)
        change = change * (lr / excess)
        if self.first_moment:
            mean = state["exp_avg"] * factors["beta1"] + change * factors["one_minus_beta1"]
            kept["exp_avg"] = change = keep(mean, state["exp_avg"])
        return param - (param * (factors["weight_decay"] * lr) + change), kept


@dataclass(frozen=True, kw_only=True)
class TorchAdafactor(UpdateRule):
    """Adafactor as torch.optim.Adafactor computes it, always relative to a parameter's size.

    Source: torch, optim/_adafactor.py. Rows and columns as of `Adafactor`.
    """

    parameters = TorchAdafactorParams

    @property
    def slots(self) -> tuple[str, ...]:
        """All that a parameter may have: the row and the column, or the elements' own mean."""
        return ("row_var", "col_var", "variance")

    def slots_of(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """Row and column of a parameter of two dims or more, else the elements' own mean."""
        if len(shape) < 2:
            return (Slot(name="variance"),)
        row = Slot(name="row_var", shape=(*shape[:-1], 1))
        return (row, Slot(name="col_var", shape=(*shape[:-2], 1, shape[-1])))

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The group's numbers; an eps of None is that of fp32, in which masters are."""
        eps, least = group["eps"]
        eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
        lr = float(group["lr"])
        return {
            "lr": lr,
            "beta2_decay": float(group["beta2_decay"]),
            "eps": eps,
            "eps_squared": eps * eps,
            "least_rms": float(least),
            "d": float(group["d"]),
            "decay": lr * float(group["weight_decay"]),
        }

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """The step size, and the weight of the new squares, ``step ** beta2_decay``."""
        factors = dict(hyper)
        factors["new"] = torch.exp(step.log() * factors.pop("beta2_decay"))
        return factors | {"lr": hyper["lr"].minimum(step.rsqrt())}

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        factors, whole, keep = terms.factors, terms.whole, terms.keep
        rate = factors["lr"] * _rms(param, whole).maximum(factors["least_rms"])
        squares, new = grad * grad, factors["new"]
        if "variance" in state:
            mean = _toward(state["variance"], squares, new, keep)
            kept = {"variance": mean}
            change = mean.maximum(factors["eps_squared"]).rsqrt() * grad
        else:
            full = _full(squares, whole)
            row = _toward(state["row_var"], full.mean(-1, keepdim=True), new, keep)
            column = _toward(state["col_var"], full.mean(-2, keepdim=True), new, keep)
            kept = {"row_var": row, "col_var": column}
            of_rows = row / row.mean(-2, keepdim=True).maximum(factors["eps"])
            factor = (of_rows * column).maximum(factors["eps_squared"]).rsqrt()
            change = _times(grad, factor, whole)
        excess = (_rms(change, whole) / factors["d"]).clamp(min=1.0)
        return param - (param * factors["decay"] + change * (rate / excess)), kept


def _toward(mean: Tensor, value: Tensor, weight: Tensor, keep: Any) -> Tensor:
    """The running mean that takes `weight` of the new value."""
    return keep(mean + (value - mean) * weight, mean)


def _rms(stored: Tensor, whole: WholeTensor) -> Tensor:
    """The root of the mean square of a whole tensor, 0-dim."""
    return (whole.sum(stored * stored) / math.prod(whole.shape)).sqrt()


def _full(stored: Tensor, whole: WholeTensor) -> Tensor:
    """A tensor in the parameter's own shape; only a flat one has to be gathered for it."""
    return stored if tuple(stored.shape) == whole.shape else whole.gather(stored)


def _times(stored: Tensor, factor: Tensor, whole: WholeTensor) -> Tensor:
    """A tensor times a factor `[*shape]` of the parameter."""
    if tuple(stored.shape) == whole.shape:
        return factor * stored
    return whole.store(factor * whole.gather(stored))
