"""Decides which micro-batches of `train_batch` are traced, and which are replayed."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmdzero.backend import ProgramLostError, compiler, current
from spmdzero.engine._folded_call import keep_waiting
from spmdzero.engine._input_form import InputForm, UnknownInputError
from spmdzero.engine._kinds import TRACES, NotCapturableError, Trust, errors_are_the_users
from spmdzero.engine._known_kinds import OBSERVED, KnownKinds
from spmdzero.engine._launching import Launching
from spmdzero.engine._loss import find_loss
from spmdzero.engine._programs import Compiled
from spmdzero.engine._schedule import require_metrics
from spmdzero.engine._step_end import StepEnd
from spmdzero.engine._three_calls import ThreeCalls
from spmdzero.engine._whole_step import WholeStep, trace_whole_step
from spmdzero.state._training import Training

_CALL = "train_batch"


class CapturedSteps:
    """Decides for each micro-batch of `train_batch` whether it is traced or replayed.

    A micro-batch is traced as one function, see `WholeStep`. The first three of a kind are traced
    and compared; if they are equal, later ones start the compiled program without tracing anything.
    Everything that a trace depends on is watched, so that a change brings tracing back.

    Args:
        training: the training of the engine.
        calls: train a micro-batch that is traced.
        launching: takes note of the programs that are started.
        kinds: what is known of micro-batches.
        step_end: ends the micro-batches that `calls` doesn't trace.
        call: `calls.forward` with the hooks around it.

    Attributes:
        replayed, traced: numbers of micro-batches so far.
        reason: why the latest micro-batch was traced, None if it was replayed.
    """

    def __init__(
        self,
        training: Training,
        *,
        calls: ThreeCalls,
        launching: Launching,
        kinds: KnownKinds,
        step_end: StepEnd,
        call: Callable[..., Any],
    ) -> None:
        self._training, self._calls, self._call = training, calls, call
        self._launching, self._step_end = launching, step_end
        self._kinds = kinds
        self.replayed = self.traced = 0
        self.reason: str | None = None

    def __repr__(self) -> str:
        why = f", the latest because {self.reason}" if self.reason else ""
        return f"CapturedSteps({self.replayed} replayed, {self.traced} traced{why})"

    def check(self) -> None:
        """Makes the next micro-batch of each kind be traced again and compared with its program.

        It is for code whose path depends on something that spmdzero can't see: a global variable,
        the time, a file. Call it when that changes.
        """
        self._kinds.recheck(_CALL)

    def micro_batch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, last: bool, steps: bool
    ) -> None:
        """Runs one micro-batch; traces it if there is a reason to.

        Args:
            args, kwargs: the inputs of the forward.
            last: whether it is the last of its step.
            steps: whether each micro-batch ends with `engine.step`, not only the last.
        """
        training, calls, ends = self._training, self._calls, last or steps
        if training.optimizer is not None:
            training.optimizer.renew()
        blocked = self._kinds.refusal(_CALL)
        if blocked is None and training.optimizer is None:
            blocked = "there is no optimizer"
        if blocked is not None:
            self._trace(lambda: self._call(*args, **kwargs), blocked, ends=ends)
            return
        placed = calls.place_inputs(args, kwargs)
        # The tensors that another engine's backward will need belong to the pending program.
        keep_waiting(ending=training if last else None)
        # Pending tensors may depend on buffers that the program donates; a `clone` shares its
        # buffer until it is computed.
        compiler.start_pending(training.device)
        trust: Trust[WholeStep] | None = None
        try:
            form = InputForm.of(*placed)
            trust = self._kinds.find(_CALL, form.with_places(), Trust, part=(last, ends))
            reason = self._start(trust, placed, form, last=last)
        except (UnknownInputError, NotCapturableError) as error:
            reason = str(error)
            with errors_are_the_users(trust):
                self._trace(lambda: calls.forward_placed(*placed), reason, ends=ends)
            return
        self.reason = reason
        self.replayed += reason is None
        self.traced += reason is not None
        if ends:
            self._step_end.end_micro_batch(boundary=last, lr_kwargs={})

    def _start(
        self,
        trust: Trust[WholeStep],
        placed: tuple[Any, Any],
        form: InputForm,
        *,
        last: bool,
    ) -> str | None:
        """Starts the micro-batch as one program; returns why it was traced, or None.

        Raises:
            NotCapturableError: it can't be one program; nothing has happened.
        """
        training = self._training
        if trust.given_up is not None:
            raise NotCapturableError(trust.given_up)
        reason = None
        if not trust.ready:
            reason = self._verify(trust, placed, form, last=last)
        step = trust.record
        assert step is not None
        if last:
            require_metrics(training.lr_scheduler, {})
        generator = torch.get_rng_state()
        try:
            sources = step.sources(training, form.tensors, last=last)
            loss, compiled = self._start_program(step, sources, "boundary" if last else "micro")
        except BaseException:
            torch.set_rng_state(generator)
            raise
        training.current.pass_backward(loss, pending=False)
        training.gradients.adopt(step.summed)
        training.counters.pass_backward()
        self._launching.started("boundary" if last else "micro", compiled)
        return reason

    def _start_program(
        self, step: WholeStep, sources: list[torch.Tensor], kind: str
    ) -> tuple[torch.Tensor, Compiled]:
        if step.program is not None:
            try:
                return step.start(sources), Compiled()
            except ProgramLostError:
                self._kinds.say(
                    logging.INFO,
                    "train_batch compiles a program again: %s",
                    f"{current().name} let go of it for others that were used since",
                )
        before = Compiled.so_far()
        with self._launching.compiling(kind):
            step.compile(sources)
        compiled = Compiled.so_far() - before
        try:
            return step.start(sources), compiled
        except ProgramLostError as error:
            raise NotCapturableError(
                f"{current().name} keeps no program until it is started"
            ) from error

    def _verify(
        self, trust: Trust[WholeStep], placed: tuple[Any, Any], form: InputForm, *, last: bool
    ) -> str:
        """Traces the micro-batch, compares it with the latest of its kind; returns the reason."""
        seen = trust.equal
        trace = functools.partial(
            trace_whole_step, self._training, *placed, form.tensors, last=last
        )
        with self._launching.programs.own_reads():
            self._training.state.own_numbers()
        reason = self._kinds.compare(_CALL, trust, trace)
        if trust.record is None:
            raise NotCapturableError(str(reason))
        return reason or f"this kind of micro-batch was seen {seen} of {TRACES} times"

    def _trace(self, forward: Any, reason: str, *, ends: bool) -> None:
        self.reason = reason
        self.traced += 1
        if self._training.spmd_config.spmd.capture:
            # A caller that reads a step's program knows that the step is traced for it.
            level = logging.DEBUG if reason == OBSERVED else logging.INFO
            self._kinds.say_python(level, _CALL, "in this step", reason)
        self._run(forward, ends=ends)
        self._kinds.accept_changes()

    def _run(self, forward: Callable[[], Any], *, ends: bool) -> None:
        """Traces a micro-batch and starts it; calls `step`, which may end the step, if `ends`."""
        training = self._training
        loss = find_loss(forward())
        self._calls.backward(loss)
        share = loss.detach() / training.batch.accumulation
        # `before` lives until the program has started: otherwise JAX's backend would donate its
        # memory from the second micro-batch on, which would need a second program.
        before = training.state["total"]
        training.state.write("total", before + share)
        # A live tensor would be an output of the program.
        del loss, share
        if ends:
            self._calls.step()
        else:
            self._calls.end_unstepped()
