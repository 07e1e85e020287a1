"""Numbers about an engine's training so far, under DeepSpeed's names."""

import math
from typing import Any

import torch

from spmdzero.errors import OutOfRangeError
from spmdzero.state._training import Training


class Progress:
    """The progress of `training`, and numbers of its latest step."""

    def __init__(self, training: Training) -> None:
        self._training = training

    @property
    def micro_losses(self) -> tuple[torch.Tensor, ...]:
        """The losses of the step's micro-batches so far, 0-dim on the device."""
        return tuple(self._training.current.losses)

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` was a boundary whose update was not skipped."""
        applied, optimizer = self._training.current.applied, self._training.optimizer
        if not applied or optimizer is None or optimizer.scaler:
            return applied
        return not optimizer.overflow

    def get_lr(self) -> list[float]:
        """The lr of each param group, for the next step.

        With a schedule this reads one scalar, except in fp16: skipped steps hold the schedule back.
        """
        return [float(group["lr"]) for group in self._groups_now()]

    def get_mom(self) -> list[Any]:
        """The betas of each param group, or its momentum (SGD, RMSprop), or 0.0 if it has neither.

        The groups that Muon trains have 0.0 too, as in DeepSpeed.
        """
        groups = self._groups_now()
        momenta = (g.get("momentum", 0.0) if "use_muon" not in g else 0.0 for g in groups)
        return [group.get("betas", mom) for group, mom in zip(groups, momenta, strict=True)]

    def _groups_now(self) -> list[dict[str, Any]]:
        optimizer = self._training.optimizer
        if optimizer is None:
            return []
        if optimizer.hold is None:
            return optimizer.param_groups
        optimizer.hold.settle(self._training.skipped_steps)
        return optimizer.hold.groups_now(optimizer.param_groups)

    @property
    def cur_scale(self) -> float:
        """The loss scale, by which the loss is multiplied before backward; 1.0 except in fp16."""
        return self._training.optimizer.loss_scale if self._training.optimizer else 1.0

    def get_global_grad_norm(self) -> float | None:
        """The L2 norm of all gradients of the latest step, unscaled and before clipping.

        It reads one scalar and so waits for the step. It is None before the first step.

        Raises:
            OutOfRangeError: it is not finite, and the cause is an index out of range.
        """
        optimizer = self._training.optimizer
        if optimizer is None or optimizer.grad_norm is None:
            return None
        norm = optimizer.grad_norm.item()
        # A loss that is not finite gives such a norm; reading its record costs one more read.
        if not math.isfinite(norm):
            look(self._training)
        return norm


def look(training: Training) -> None:
    """Reads what the devices have found since the latest look; waits for them.

    It logs the first step whose loss was not finite, unless an index is the cause.

    Raises:
        ReplicaRegionError: an integer output or buffer differs between replicas.
        OutOfRangeError: an index lay outside of what it indexes, such as a label that is no class.
    """
    step = training.health.first_bad_step()
    try:
        training.health.check_indices()
        if training.region is not None:
            training.region.check_agreement()
    except OutOfRangeError as error:
        if step is None:
            raise
        raise OutOfRangeError(f"{error}. The loss is not finite since step {step}") from None
    if step is not None:
        training.health.say_bad(step)
