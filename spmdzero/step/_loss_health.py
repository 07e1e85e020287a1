"""Watches losses for NaN and infinity without reading them at every step."""

import logging

import torch

from spmdzero.backend import REPLICATED, Mesh
from spmdzero.errors import NonFiniteError
from spmdzero.step._numbers import step_number

logger = logging.getLogger("spmdzero")


def watched(
    loss: torch.Tensor, step: torch.Tensor, *, first_bad: torch.Tensor, finite: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The record after `loss`, 0-dim: 1 + the first bad step, and whether all were finite.

    Args:
        loss: of a micro-batch.
        step: 1 + the step, 0-dim int32.
        first_bad, finite: the record before.
    """
    bad = ~torch.isfinite(loss)
    return torch.where(bad & (first_bad == 0), step, first_bad), finite & ~bad


class LossHealth:
    """Remembers on the device at which step a loss was first not finite.

    Args:
        mesh: the devices.
        check: read after every step, and raise: `"spmd": {"check_finite": true}`.

    Attributes:
        check: the argument.
    """

    def __init__(self, *, mesh: Mesh, check: bool) -> None:
        self._mesh, self.check = mesh, check
        self._first_bad = self._none_bad()
        self._finite = self._all_finite()
        self._loss: torch.Tensor | None = None

    def watch(self, loss: torch.Tensor, *, step: int) -> None:
        """Takes note of a loss of `step`, 0-dim on the device."""
        here = self._mesh.place(step_number(step))
        first_bad, finite = watched(loss, here, first_bad=self._first_bad, finite=self._finite)
        self._mesh.commit(self._first_bad, first_bad, REPLICATED)
        if self.check:
            self._finite, self._loss = self._mesh.mark(finite, REPLICATED), loss

    def _none_bad(self) -> torch.Tensor:
        # 1 + the first bad step, 0 for none; the step is data, a Python int would recompile.
        return self._mesh.place(torch.zeros((), dtype=torch.int32))

    def _all_finite(self) -> torch.Tensor:
        # It is uploaded: the first micro-batch of a step then has the graph of the others.
        return self._mesh.place(torch.ones((), dtype=torch.bool))

    def finite(self) -> torch.Tensor | None:
        """Whether all losses since the last step were finite, on the device; None: not asked."""
        return self._finite if self.check else None

    def raise_if_asked(self, grad_norm: torch.Tensor | None) -> None:
        """Reads the losses' health, and at a boundary the gradient norm, if that was asked for.

        Raises:
            NonFiniteError: one of them is not finite; the update was not applied.
        """
        if not self.check or self._loss is None:
            return
        finite, loss = self._finite.item(), self._loss
        if grad_norm is not None or not finite:
            self._finite = self._all_finite()
        unchanged = "parameters and optimizer states are as they were before this step"
        if not finite:
            step = self._first_bad.item() - 1
            self._first_bad = self._none_bad()
            raise NonFiniteError(f"the loss is {loss.item()} at step {step}: {unchanged}")
        if grad_norm is not None and not torch.isfinite(grad_norm).item():
            raise NonFiniteError(
                f"the gradient norm is {grad_norm.item()} although the loss is {loss.item()}: "
                + unchanged
            )

    def log_if_bad(self) -> None:
        """Reads the record and names the first step whose loss was not finite, once."""
        step = self._first_bad.item() - 1
        if step >= 0:
            logger.warning(
                "the loss was not finite at step %d. "
                'Set "spmd": {"check_finite": true} to stop before such an update',
                step,
            )
            self._first_bad = self._none_bad()
