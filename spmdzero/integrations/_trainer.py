"""What transformers and accelerate read from the devices at each step, read when it is logged.

The one place that knows private names of theirs. Where a release has renamed one, it is read at
each step again, and nothing else changes.
"""

import sys
from typing import Any

import torch

from spmdzero.backend import arrays
from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._deferred import DeferredTensor

_LOSS = "_tr_loss"


def defer_reads() -> None:
    """Has those that are imported read losses and norms where they are logged."""
    wrappers = sys.modules.get("accelerate.utils.deepspeed")
    if wrappers is not None:
        _defer_norm(wrappers.DeepSpeedEngineWrapper)
    masks = sys.modules.get("transformers.masking_utils")
    if masks is not None:
        _mask_without_reading(masks)
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None and not isinstance(vars(trainer.Trainer).get(_LOSS), _SummedLoss):
        _defer_trainers_norm(trainer.Trainer)
        setattr(trainer.Trainer, _LOSS, _SummedLoss())


def _engine_of(accelerator: Any) -> ClientEngine | None:
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    return engine if isinstance(engine, ClientEngine) else None


def _defer_norm(wrapper: Any) -> None:
    original = getattr(wrapper, "get_global_grad_norm", None)
    if original is None or hasattr(original, "spmdzero"):
        return

    def get_global_grad_norm(self: Any) -> Any:
        if isinstance(self.engine, ClientEngine):
            return self.engine.deferred_grad_norm()
        return original(self)

    get_global_grad_norm.spmdzero = True  # pyrefly: ignore[missing-attribute]
    wrapper.get_global_grad_norm = get_global_grad_norm


def _mask_without_reading(masks: Any) -> None:
    original = getattr(masks, "is_tracing", None)
    if original is None or hasattr(original, "spmdzero"):
        return

    def is_tracing(tensor: Any = None) -> bool:
        # Else it asks at each forward whether an attention mask hides anything, to leave it out.
        # Operations on the devices are traced.
        return original(tensor) or (isinstance(tensor, torch.Tensor) and arrays.is_mine(tensor))

    is_tracing.spmdzero = True  # pyrefly: ignore[missing-attribute]
    masks.is_tracing = is_tracing


def _defer_trainers_norm(trainer: Any) -> None:
    original = getattr(trainer, "_get_grad_norm", None)
    if original is None:
        return

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        # What logs takes a tensor as well as a number.
        engine = _engine_of(self.accelerator)
        return original(self, model, grad_norm) if engine is None else engine.deferred_grad_norm()

    trainer._get_grad_norm = _get_grad_norm


class _SummedLoss:
    """`Trainer._tr_loss`, the sum of the losses since the latest log line, kept on the devices."""

    def __get__(self, trainer: Any, owner: type) -> Any:
        return self if trainer is None else vars(trainer)[_LOSS]

    def __set__(self, trainer: Any, value: torch.Tensor) -> None:
        engine = _engine_of(trainer.accelerator)
        if engine is not None and not isinstance(value, DeferredTensor):
            # Its filter of losses that are not finite reads each of them. It is off on a TPU in
            # transformers as well.
            trainer.args.logging_nan_inf_filter = False
            value = DeferredTensor(value.to(engine.device), computes=True)
        vars(trainer)[_LOSS] = value
