"""DeepSpeed's optimizer classes: param groups and defaults that `initialize` turns into rules."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from spmdzero.errors import SpmdZeroUsageError

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class _Named(torch.optim.Optimizer):
    """An optimizer that only holds param groups; the engine updates its parameters."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Does nothing without gradients, as in torch; the engine does the steps.

        Raises:
            SpmdZeroUsageError: a parameter has a gradient that would have to be applied.
        """
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise SpmdZeroUsageError(
                f"{type(self).__name__}.step() has no kernel of its own: hand the optimizer to "
                "initialize(optimizer=...) and call engine.step()"
            )


class FusedAdam(_Named):
    """AdamW, or Adam if `adam_w_mode` is false, with DeepSpeed's signature and defaults.

    DeepSpeed, ops/adam/fused_adam.py. `set_grad_none` has no effect: gradients are the engine's.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers | {"bias_correction": bias_correction, "amsgrad": amsgrad})
        self.adam_w_mode = adam_w_mode


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with the signature of the class that DeepSpeed requires for offloading.

    DeepSpeed, ops/adam/cpu_adam.py. The devices do the update, wherever states are stored, and
    states have the masters' dtype: `fp32_optimizer_states` has no effect.
    """

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


class FusedLion(_Named):
    """Lion with DeepSpeed's signature and defaults.

    DeepSpeed, ops/lion/fused_lion.py. `set_grad_none` has no effect: gradients are the engine's.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class DeepSpeedCPULion(FusedLion):
    """`FusedLion` with the signature of the class that DeepSpeed requires for offloading.

    DeepSpeed, ops/lion/cpu_lion.py; `fp32_optimizer_states` as in `DeepSpeedCPUAdam`.
    """

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLamb(_Named):
    """LAMB with DeepSpeed's signature and defaults.

    DeepSpeed, ops/lamb/fused_lamb.py. `initialize` refuses `max_grad_norm` above 0, because the
    engine clips.
    """

    def __init__(
        self,
        params: Params,
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
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        coefficients = {"max_coeff": max_coeff, "min_coeff": min_coeff}
        switches = {"bias_correction": bias_correction, "amsgrad": amsgrad}
        defaults = numbers | coefficients | switches | {"max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)
        self.eps_inside_sqrt = eps_inside_sqrt
