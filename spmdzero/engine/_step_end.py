"""The work after the launch of a micro-batch: counts, overflows, the schedule, log lines."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._names import listed
from spmdzero.backend import is_tracing_only, runtime
from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._launching import Launching
from spmdzero.engine._progress import Progress, look
from spmdzero.engine._schedule import note_step
from spmdzero.errors import NonFiniteError, SpmdZeroRuntimeError
from spmdzero.state._training import Training
from spmdzero.step._optimizer import ZeroOptimizer

logger = logging.getLogger("spmdzero")


class FreezeWatch:
    """Compares the parameters that require a gradient with those that the plan trains."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._seen = self._now()
        self._said: set[str] = set()

    def look(self) -> None:
        """Logs a warning that names the parameters that changed; each parameter once."""
        now = self._now()
        if now == self._seen:
            return
        names = list(self._training.state.parameters)
        changed = [n for n, old, new in zip(names, self._seen, now, strict=True) if old != new]
        requires, self._seen = dict(zip(names, now, strict=True)), now
        planned = self._training.plan
        self._say(
            [name for name in changed if requires[name] and not planned[name].trainable],
            "%s: requires_grad was turned on after initialize, whose plan doesn't train it. It "
            "stays as it is, as in DeepSpeed. Turn it on before initialize, and off afterwards",
        )
        self._say(
            [name for name in changed if not requires[name] and planned[name].trainable],
            "%s: requires_grad was turned off after initialize, whose plan trains it. Its gradient "
            "counts as zero, as in DeepSpeed: weight decay and momentum still move it",
        )

    def _say(self, names: list[str], message: str) -> None:
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        if new:
            logger.warning(message, listed(new, most=5))

    def _now(self) -> list[bool]:
        # A subclass of torch's tensors would run Python for each parameter, at each step.
        with torch._C.DisableTorchFunctionSubclass():
            return [p.requires_grad for p in self._training.state.parameters.values()]


EVERY = 64


class AgreementRhythm:
    """Decides when the host reads what the devices found: after 1, 2, 4, ... 64, 128, 192, ...

    The numbers count micro-batches. The devices remember a disagreement, an index out of range and
    a loss that is not finite, so a late read misses none; but each read waits for the devices.
    """

    def __init__(self) -> None:
        self._passed = 0

    def is_due(self) -> bool:
        """Counts one micro-batch; returns whether the host reads after it."""
        self._passed += 1
        few = self._passed < EVERY
        # A power of two has one bit.
        return self._passed.bit_count() == 1 if few else self._passed % EVERY == 0


class StepEnd:
    """Ends micro-batches and steps on the host.

    Attributes:
        after_step: functions that are called after each step.
        agreement: decides when the host reads what the devices found.
    """

    def __init__(
        self,
        training: Training,
        *,
        accumulation: Accumulation,
        launching: Launching,
        progress: Progress,
    ) -> None:
        self._training, self._accumulation = training, accumulation
        self._programs, self._progress = launching.programs, progress
        self.after_step: list[Callable[[], None]] = []
        self.agreement = AgreementRhythm()
        self._freezing = FreezeWatch(training)

    def end_micro_batch(self, *, boundary: bool, lr_kwargs: dict[str, Any]) -> None:
        """Counts a micro-batch that was started, and at the boundary the step.

        Raises:
            NonFiniteError, SpmdZeroRuntimeError, ReplicaRegionError, OutOfRangeError: see
                `ThreeCalls.step`.
        """
        training, optimizer = self._training, self._training.optimizer
        assert optimizer is not None
        training.current.end_micro_batch(boundary=boundary)
        try:
            skipped = self._was_skipped(optimizer, boundary=boundary)
        except (NonFiniteError, SpmdZeroRuntimeError):
            if boundary:
                optimizer.forget_skip()
            training.restart_step()
            self._programs.stepped()
            raise
        training.current.pass_update(applied=boundary and not skipped)
        training.counters.pass_micro_batch()
        try:
            if boundary:
                self._finish_step(optimizer, lr_kwargs, skipped=skipped)
            # A step that is only traced has found nothing: its program doesn't run.
            if self.agreement.is_due() and not is_tracing_only():
                look(self._training)
        finally:
            # The step is done, even if a schedule, a monitor or a check raises.
            if boundary:
                training.current.end()
            self._programs.stepped()

    def _was_skipped(self, optimizer: ZeroOptimizer, *, boundary: bool) -> bool:
        """Whether an overflow skipped the step, if the host has to know; updates the loss scale."""
        # A dynamic loss scale finds its size by overflows, which are no failures.
        checked = boundary and not optimizer.dynamic_loss_scale
        self._training.health.raise_if_asked(optimizer.grad_norm if checked else None)
        if not boundary or optimizer.scaler is None:
            return False
        # The step's only read: the scale and the schedule depend on it.
        skipped = optimizer.overflow
        optimizer.scaler.update_scale(skipped)
        return skipped

    def _finish_step(
        self, optimizer: ZeroOptimizer, lr_kwargs: dict[str, Any], *, skipped: bool
    ) -> None:
        training, counters = self._training, self._training.counters
        note_step(optimizer)
        counters.pass_step(samples=self._accumulation.samples_of_step(), skipped=skipped)
        self._freezing.look()
        hold = optimizer.hold
        if skipped:
            training.skips.tell(
                training.skipped_steps,
                step=counters.global_steps,
                since=counters.global_steps - 1,
                # A dynamic loss scale finds its size by skipped steps.
                level=logging.INFO if optimizer.dynamic_loss_scale else logging.WARNING,
            )
            if hold is not None:
                hold.stand_still()
        elif training.lr_scheduler is not None and (hold is None or hold.advance()):
            training.lr_scheduler.step(**lr_kwargs)
        every = training.spmd_config.steps_per_print
        if every and counters.global_steps % every == 0:
            self._report()
        for hook in self.after_step:
            hook()

    def _report(self) -> None:
        training = self._training
        look(training)
        if runtime.process_index() == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                training.counters.global_steps, training.skipped_steps,
                self._progress.get_lr(), self._progress.get_mom(),
            )  # fmt: skip
