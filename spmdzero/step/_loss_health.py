"""Watches losses for NaN and infinity without reading them at every step."""

import logging
from collections.abc import Sequence

import torch

from spmdzero.backend import REPLICATED, arrays
from spmdzero.errors import NonFiniteError
from spmdzero.step._folds import Folds
from spmdzero.step._numbers import step_number
from spmdzero.step._state import State

logger = logging.getLogger("spmdzero")


def watched(
    loss: torch.Tensor, step: torch.Tensor, *, first_bad: torch.Tensor, finite: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The record after `loss`, 0-dim: 1 + the first bad step, and whether all were finite.

    Args:
        loss: the loss of a micro-batch.
        step: 1 + the step, 0-dim int32.
        first_bad, finite: the record before `loss`.
    """
    bad = ~torch.isfinite(loss)
    return torch.where(bad & (first_bad == 0), step, first_bad), finite & ~bad


def _gradient(loss: torch.Tensor, parts: int, *scale: torch.Tensor) -> torch.Tensor:
    """What autograd computes for `loss` where ``loss / parts``, times the scale, is differentiated.

    Args:
        loss: a scalar.
        parts: a number.
        scale: fp16's loss scale, 0-dim float32, if there is one.
    """
    gradient = torch.ones_like(loss)
    for factor in scale:
        gradient = (gradient * factor).to(loss.dtype)
    return gradient if parts == 1 else gradient / parts


class LossHealth:
    """Remembers on the devices the first step with a non-finite loss.

    Args:
        state: the state that holds the record.
        check: whether to read after every step, and raise: `"spmd": {"check_finite": true}`.

    Attributes:
        check: the argument.
    """

    def __init__(self, state: State, *, check: bool) -> None:
        self._state, self.check = state, check
        self._folds = Folds.of_few(state.mesh)
        self._forget_bad()
        self._forget_losses()

    def watch(
        self,
        loss: torch.Tensor,
        mean: torch.Tensor,
        *,
        parts: int,
        step: int,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Takes note of a loss of `step`.

        Args:
            loss: a scalar on the devices.
            mean: its mean over the hosts.
            parts: see below.
            step: number of steps before it.
            scale: fp16's loss scale, 0-dim float32; None without one.

        Returns a copy of `mean`, 0-dim; `loss / parts`, a tensor of its own; and the gradient of
        `loss` with which its backward pass begins.
        """
        state, known = self._state, self._state.numbers["first_bad"]

        def watch(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            loss, mean, here, first_bad, finite, *scaled = inputs
            seen = state.mesh.mark(arrays.apart(mean.reshape(())), REPLICATED)
            share = arrays.apart(loss if parts == 1 else loss / parts)
            gradient = _gradient(loss, parts, *scaled)
            bad, finite = watched(seen, here, first_bad=first_bad, finite=finite)
            return [bad, seen, share, gradient, *([finite] if self.check else [])]

        here = state.mesh.place(step_number(step), waits=True)
        inputs = [loss, mean, here, known, state.numbers["finite"]]
        inputs += [] if scale is None else [scale]
        with torch.no_grad():
            first_bad, seen, share, gradient, *finite = self._folds(
                ("watched", parts), watch, inputs
            )
        state.write("first_bad", first_bad, known=known)
        if self.check:
            state.write("finite", *finite)
            state.write("loss", seen)
        return seen, share, gradient

    def _forget_bad(self) -> None:
        # The record is 1 + the first bad step, 0 for none. It is data, as a Python int would
        # recompile.
        self._state.upload("first_bad", torch.zeros((), dtype=torch.int32))

    def _forget_losses(self) -> None:
        # The value is uploaded, so that a step's first micro-batch has the same graph as the
        # others.
        self._state.upload("finite", torch.ones((), dtype=torch.bool))

    def finite(self) -> torch.Tensor | None:
        """Whether all losses since the last step were finite, on the device, or None."""
        return self._state["finite"] if self.check else None

    def raise_if_asked(self, grad_norm: torch.Tensor | None) -> None:
        """Reads with `check` the record of losses, and at a boundary the gradient norm.

        Raises:
            NonFiniteError: a loss or the norm is not finite; the update was not applied.
        """
        loss = self._state.get("loss")
        if not self.check or loss is None:
            return
        finite = self._state["finite"].item()
        if grad_norm is not None or not finite:
            self._forget_losses()
        unchanged = "parameters and optimizer states are as they were before this step"
        if not finite:
            step = self._state["first_bad"].item() - 1
            self._forget_bad()
            raise NonFiniteError(f"the loss is {loss.item()} at step {step}: {unchanged}")
        if grad_norm is not None and not torch.isfinite(grad_norm).item():
            raise NonFiniteError(
                f"the gradient norm is {grad_norm.item()} although the loss is {loss.item()}: "
                + unchanged
            )

    def log_if_bad(self) -> None:
        """Reads the record, and logs once the first step whose loss was not finite."""
        step = self._state["first_bad"].item() - 1
        if step >= 0:
            logger.warning(
                "the loss was not finite at step %d. "
                'Set "spmd": {"check_finite": true} to stop before such an update',
                step,
            )
            self._forget_bad()
