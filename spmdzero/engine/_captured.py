"""Replaying a step: which micro-batches of `train_batch` are traced, and which are not."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend.torch_xla import ProgramLostError, start_pending
from spmdzero.engine._capture_blocks import block
from spmdzero.engine._capture_follow import Following
from spmdzero.engine._capture_kind import TRACES, Kind, modes
from spmdzero.engine._capture_places import own_numbers
from spmdzero.engine._capture_signature import Signature, UnknownInputError
from spmdzero.engine._capture_watch import ModuleWatch
from spmdzero.engine._folded_call import keep_waiting
from spmdzero.engine._launching import Launching
from spmdzero.engine._loss import find_loss
from spmdzero.engine._record import Record
from spmdzero.engine._recording import Recording
from spmdzero.engine._replay import current_state, replay
from spmdzero.engine._step_end import StepEnd
from spmdzero.engine._three_calls import ThreeCalls
from spmdzero.state._training import Training


class CapturedSteps:
    """Decides for each micro-batch of `train_batch` whether it is traced or replayed.

    The first three of a kind are traced, and compared: graph, numbers, random draws, state. When
    they are equal, later ones start the compiled program without tracing anything. What a trace
    depends on is watched, so that a change brings tracing back.

    Args:
        training: whose.
        calls: train a micro-batch that is traced.
        launching: starts its programs.
        step_end: ends one that is replayed.
        call: `calls.forward` with whatever hooks there are around it.

    Attributes:
        replayed, traced: micro-batches so far.
        reason: why the latest micro-batch was traced, None if it was replayed.
    """

    def __init__(
        self,
        training: Training,
        *,
        calls: ThreeCalls,
        launching: Launching,
        step_end: StepEnd,
        call: Callable[..., Any],
    ) -> None:
        self._training, self._calls, self._call = training, calls, call
        self._launching, self._step_end = launching, step_end
        self._following: Following[Kind[Record]] = Following(
            look=self._look, is_ready=lambda kind: kind.ready
        )
        self.replayed = self.traced = 0
        self.reason: str | None = None

    def __repr__(self) -> str:
        why = f", the latest because {self.reason}" if self.reason else ""
        return f"CapturedSteps({self.replayed} replayed, {self.traced} traced{why})"

    def check(self) -> None:
        """Has the next micro-batch of each kind traced again and compared with what is replayed.

        For code that chooses its way by something that spmdzero can't see: a global variable,
        the time, a file. Whoever knows when it changes calls this.
        """
        for kind in self._following.kinds.values():
            kind.recheck()

    def micro_batch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, last: bool, steps: bool
    ) -> None:
        """Runs one micro-batch; traces it if there is a reason to.

        Args:
            args, kwargs: the inputs of the forward.
            last: it is the last of its step.
            steps: each micro-batch ends with `engine.step`, not only the last.
        """
        training, calls, ends = self._training, self._calls, last or steps
        blocked = self._follow_structure() or block(
            training, self._launching, self._following.parameters
        )
        if blocked is not None:
            self._trace(lambda: self._call(*args, **kwargs), blocked, ends=ends)
            return
        placed = calls.place_inputs(args, kwargs)
        # What another engine's backward will need belongs to what is pending now.
        keep_waiting(ending=training if last else None)
        # It may depend on buffers that the program donates; a `clone` shares one until then.
        start_pending(training.device)
        try:
            signature = Signature.of(*placed)
        except UnknownInputError as error:
            self._trace(lambda: calls.forward_placed(*placed), str(error), ends=ends)
            return
        kind = self._kind(last, ends, signature)
        reason = kind.given_up
        if reason is None and kind.ready and kind.record is not None:
            state = current_state(kind.record)
            if isinstance(state, str):
                reason = state
            elif self._replay(kind.record, state, signature, last=last, ends=ends):
                return
        if reason is not None:
            self._trace(lambda: calls.forward_placed(*placed), reason, ends=ends)
            return
        self._record(kind, placed, signature, ends=ends)

    def _replay(
        self,
        record: Record,
        state: Sequence[torch.Tensor],
        signature: Signature,
        *,
        last: bool,
        ends: bool,
    ) -> bool:
        """Whether the micro-batch could be replayed; if not, nothing has happened."""
        try:
            replay(
                self._training,
                record,
                state,
                signature.tensors,
                launching=self._launching,
                step_end=self._step_end if ends else None,
                last=last,
            )
        except ProgramLostError:
            self._following.say(
                logging.INFO,
                "train_batch captures a program again: %s",
                "torch_xla let go of it for others that were used since",
            )
            return False
        self.replayed, self.reason = self.replayed + 1, None
        return True

    def _follow_structure(self) -> str | None:
        if not self._training.spmd_config.spmd.capture:
            return '"spmd": {"capture": false}'
        change = self._following.changed()
        if change is not None:
            message = "train_batch captures its programs again: %s"
            self._following.say(logging.INFO, message, change)
        return self._following.hook()

    def _look(self) -> ModuleWatch:
        optimizer = self._training.optimizer
        others = {"the optimizer's state": optimizer.state} if optimizer else {}
        return ModuleWatch(self._training.module, others)

    def _kind(self, last: bool, ends: bool, signature: Signature) -> Kind[Record]:
        following = self._following
        key = (last, ends, signature.form, modes(self._training, following.parameters))
        if key in following.kinds:
            return following.kinds[key]
        if following.any_ready:
            following.say(
                logging.INFO,
                "train_batch captures one more program: %s",
                "inputs of other shapes, dtypes, shardings or values, or another mode",
            )
        return following.add(key, Kind())

    def _trace(self, forward: Any, reason: str, *, ends: bool) -> None:
        self.reason = reason
        self.traced += 1
        if self._training.spmd_config.spmd.capture:
            self._following.say(logging.INFO, "train_batch traces instead of replaying: %s", reason)
        self._run(forward, ends=ends)
        self._following.accept_changes()

    def _record(
        self, kind: Kind[Record], placed: tuple[Any, Any], signature: Signature, *, ends: bool
    ) -> None:
        calls = self._calls
        self.reason = (
            "torch_xla let go of its program for others that were used since"
            if kind.ready
            else f"this kind of micro-batch was seen {kind.equal} of {TRACES} times"
        )
        self.traced += 1
        own_numbers(self._training)
        recording = Recording(self._training, signature.tensors, self._following.watch)
        self._launching.capturing = recording.start
        try:
            with recording.uploads():
                self._run(lambda: calls.forward_placed(*placed), ends=ends)
        finally:
            self._launching.capturing = None
        reason = kind.judge(recording.outcome)
        if reason is not None:
            self.reason = reason
        if kind.given_up is not None:
            self._following.say(
                logging.WARNING, "train_batch goes on tracing every step: %s", kind.given_up
            )
        self._following.accept_changes()
        # What was read to compare is not the script's.
        self._launching.programs.stepped()

    def _run(self, forward: Callable[[], Any], *, ends: bool) -> None:
        """Traces a micro-batch and starts it; `ends` calls `step`, which may end the step."""
        training = self._training
        loss = find_loss(forward())
        self._calls.backward(loss)
        share = loss.detach() / training.batch.accumulation
        assert training.total is not None
        training.total = training.mesh.mark(training.total + share)
        # Alive, they would be outputs of the program.
        del loss, share
        if ends:
            self._calls.step()
        else:
            self._calls.end_unstepped()
