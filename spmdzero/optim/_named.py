"""DeepSpeed's optimizer classes: they carry param groups to `initialize`, which does the update."""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from spmdzero.errors import SpmdZeroUsageError


class _Named(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> NoReturn:  # type: ignore[override]
        """Refused: parameters and states live on the mesh once `initialize` has seen them.

        Raises:
            SpmdZeroUsageError: always.
        """
        raise SpmdZeroUsageError(
            f"{type(self).__name__} does not update by itself: hand it to "
            "spmdzero.initialize(optimizer=...) and call engine.step()"
        )


class FusedAdam(_Named):
    """DeepSpeed's FusedAdam (ops/adam/fused_adam.py): AdamW unless `adam_w_mode` is false.

    Raises:
        SpmdZeroUsageError: `amsgrad`, as DeepSpeed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad("FusedAdam", amsgrad)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)


class FusedLamb(_Named):
    """DeepSpeed's FusedLamb (ops/lamb/fused_lamb.py).

    Raises:
        SpmdZeroUsageError: `amsgrad`, as DeepSpeed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedLamb", amsgrad)
        self.eps_inside_sqrt = eps_inside_sqrt
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)


class FusedLion(_Named):
    """DeepSpeed's FusedLion (ops/lion/fused_lion.py)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise SpmdZeroUsageError(f"{name} does not support the AMSGrad variant: leave amsgrad out")
