"""Watches losses for NaN and infinity without reading them at every step."""

import logging
from collections.abc import Sequence

import torch

from spmdzero.backend import IndexRange, IndexSites, arrays, first_flag
from spmdzero.backend.pure import Folds
from spmdzero.errors import NonFiniteError
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
    """Computes autograd's gradient of `loss` for ``loss / parts``, times the scale.

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
        self._folds, self._sites = Folds.of_few(state.mesh), IndexSites()
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
        # Of several hosts each has indices of its own, of which the others know nothing.
        behind = arrays.indices_behind(loss) if state.mesh.across is None else []
        sites = tuple((allowed, line) for _, allowed, line in behind)

        def watch(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            loss, mean, here, first_bad, finite, *rest = inputs
            scaled, noted = rest[: len(rest) - len(indices)], rest[len(rest) - len(indices) :]
            seen = state.mesh.whole(arrays.apart(mean.reshape(())))
            share = arrays.apart(loss if parts == 1 else loss / parts)
            gradient = _gradient(loss, parts, *scaled)
            bad, finite = watched(seen, here, first_bad=first_bad, finite=finite)
            outside = self._outside(noted, sites)
            return [bad, seen, share, gradient, *outside, *([finite] if self.check else [])]

        here = state.mesh.place(step_number(step), waits=True)
        inputs = [loss, mean, here, known, state.numbers["finite"]]
        inputs += [] if scale is None else [scale]
        indices = [self._known_outside(), *(index for index, *_ in behind)] if behind else []
        with torch.no_grad():
            first_bad, seen, share, gradient, *rest = self._folds(
                ("watched", parts, sites), watch, [*inputs, *indices]
            )
        state.write("first_bad", first_bad, known=known)
        if self.check:
            state.write("finite", rest.pop())
            state.write("loss", seen)
        for outside in rest:
            state.write("outside", outside)
        return seen, share, gradient

    def _known_outside(self) -> torch.Tensor:
        if "outside" not in self._state.numbers:
            self._state.upload("outside", torch.zeros(2, dtype=torch.int32))
        return self._state.numbers["outside"]

    def _outside(
        self, noted: Sequence[torch.Tensor], sites: Sequence[tuple[IndexRange, str]]
    ) -> list[torch.Tensor]:
        """The flag of indices after those of a loss; nothing if the loss has none."""
        if not noted:
            return []
        known, *indices = noted
        for index, (allowed, line) in zip(indices, sites, strict=True):
            flag = self._sites.flag(index, allowed, line)
            known = known if flag is None else first_flag(known, flag)
        return [known]

    def check_indices(self) -> None:
        """Reads whether an index outside of the module's forward lay outside of its range.

        Raises:
            OutOfRangeError: one did.
        """
        outside = self._state.get("outside")
        if outside is not None:
            self._state.upload("outside", torch.zeros(2, dtype=torch.int32))
            self._sites.refuse(arrays.read(outside))

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

    def first_bad_step(self) -> int | None:
        """Reads and forgets the first step whose loss was not finite; None if all were."""
        step = int(self._state["first_bad"].item()) - 1
        if step < 0:
            return None
        self._forget_bad()
        return step

    @staticmethod
    def say_bad(step: int) -> None:
        """Logs that the loss of `step` was not finite."""
        logger.warning(
            "the loss was not finite at step %d, and the devices found no index out of range: a "
            "number has grown too large (a learning rate without warmup), or an input is not "
            'finite. Set "spmd": {"check_finite": true} to stop before such an update',
            step,
        )
