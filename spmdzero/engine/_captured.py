"""Folds forward, backward and update into single operations, so that little has to be recorded."""

import dataclasses
import functools
import logging
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from spmdzero.backend import arrays, compiler, current, key_of
from spmdzero.backend.pure import ModuleWatch
from spmdzero.engine._folded_call import FoldedCall, Trained
from spmdzero.engine._folded_forward import FoldedPass, Forward, ForwardContext, PassTracer
from spmdzero.engine._kinds import (
    TRACES,
    InputForm,
    KnownKinds,
    NotCapturableError,
    Trust,
    UnknownInputError,
    errors_are_the_users,
)
from spmdzero.engine._launching import Launching
from spmdzero.engine._module_tracer import TracedFunction
from spmdzero.engine._repeated_steps import RepeatedSteps
from spmdzero.state._still_placed import require_planned
from spmdzero.state._training import Training
from spmdzero.step._gradients import HeldBackward

# Of a backend that can't start a program again of which only the beginning is recorded.
_RECORDS = "this backend records each step. JAX's starts a step as one program, without its Python"


@dataclasses.dataclass(kw_only=True)
class _Forwards(Trust[FoldedPass]):
    """The compared traces of the forwards of one kind of input.

    Attributes:
        tracer: traces the forwards.
        backwards: outputs that have a gradient -> the compared traces of the backward passes.
    """

    tracer: PassTracer = dataclasses.field(init=False)
    backwards: dict[Hashable, Trust[TracedFunction]] = dataclasses.field(default_factory=dict)


class CapturedCalls:
    """Decides for a forward, its backward and the update whether the model's Python runs.

    A forward is traced as one operation of later programs, see `fold`, and so is its backward. The
    first three of a kind are compared; if they are equal, later ones run nothing of the model's
    Python. Everything that a trace depends on is watched, so that a change brings tracing back.
    What the script itself does with the outputs is recorded.

    Args:
        training: the training of the engine.
        launching: takes note of its programs.
        kinds: what is known of forwards.

    Attributes:
        replayed: number of forwards with gradients so far without the model's Python.
        compared: number of those of which the model's Python ran to be compared.
        traced: number of those whose operations were recorded as the model's Python asked for them.
        reason: why the latest ran the model's Python, None if it didn't.
        ends: starts whole programs again.
    """

    def __init__(self, training: Training, launching: Launching, kinds: KnownKinds) -> None:
        self._training, self._launching, self._kinds = training, launching, kinds
        # An evaluation, or a reference's adapters that are off, is no change of what is trained.
        self._without_gradients = KnownKinds(training, launching, gradients=False)
        # The watch for which `ends` knows programs.
        self._watch: ModuleWatch | None = None
        self._in_program, self._trained = False, Trained()
        self.ends = RepeatedSteps(training, launching)
        self.replayed = self.compared = self.traced = 0
        self.reason: str | None = None

    def __repr__(self) -> str:
        why = f", the latest because {self.reason}" if self.reason else ""
        counts = f"{self.replayed} replayed, {self.compared} compared, {self.traced} traced"
        return f"CapturedCalls({counts}{why})"

    def check(self) -> None:
        """Makes the next forward of each kind be traced again, and compared with the known one.

        It is for code whose path depends on something that spmdzero can't see: a global variable,
        the time, a file. Call it when that changes.
        """
        self._kinds.recheck()
        self._without_gradients.recheck()
        self.ends.forget()

    def blocked(self) -> str | None:
        """Why nothing may be folded now, or None if folding is allowed."""
        if current().compiler is None:
            return _RECORDS
        return self._kinds.blocked()

    def before_update(self) -> bool:
        """Whether the update that follows is folded; notes it for the pending program."""
        folds = self.blocked() is None
        self._in_program = self._in_program or folds
        return folds

    def start_again(self, *, boundary: bool) -> bool:
        """Starts the program of an earlier micro-batch that began as this one, if there is one."""
        if not self.ends.start(boundary=boundary, blocked=self.blocked() is not None):
            return False
        self._in_program = False
        return True

    def launching(self) -> bool:
        """Whether the pending program has a folded operation; starts anew for the next program."""
        folded, self._in_program = self._in_program, False
        return folded

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the engine's forward on placed inputs."""
        training = self._training
        if not torch.is_grad_enabled():
            return self._evaluate(args, kwargs)
        self.reason = self._refusal()
        forwards: _Forwards | None = None
        if self.reason is None:
            try:
                forwards, inputs = self._find(self._kinds, args, kwargs)
                return self._call(forwards, inputs)
            except NotCapturableError as reason:
                self.reason = str(reason)
        self._kinds.say_why(self.reason, always=self.reason == _RECORDS)
        self.traced += 1
        require_planned(training)
        with errors_are_the_users(forwards):
            output = training.forward(args, kwargs)
        self._kinds.accept_changes()
        return output

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a forward without gradients; counts and `reason` are those of the others."""
        training, kinds = self._training, self._without_gradients
        # What is made in inference mode stays of that mode, and a folded forward is of both.
        if current().compiler is None or torch.is_inference_mode_enabled() or kinds.refusal():
            return training.forward(args, kwargs)
        forwards: _Forwards | None = None
        try:
            forwards, inputs = self._find(kinds, args, kwargs)
            tensors = [*forwards.tracer.state, *inputs]
            _verify(kinds, forwards, tensors)
        except NotCapturableError:
            with errors_are_the_users(forwards):
                output = training.forward(args, kwargs)
            kinds.accept_changes()
            return output
        assert forwards.record is not None
        keys = forwards.record.traced.drawn(training.mesh)
        return forwards.record.output.filled(forwards.record.settled(training, tensors, keys))

    def _call(self, forwards: _Forwards, inputs: Sequence[torch.Tensor]) -> Any:
        tracer = forwards.tracer
        tensors = [*tracer.state, *inputs]
        seen = forwards.equal
        verify = _verify(self._kinds, forwards, tensors)
        if verify:
            self.reason = f"this kind of micro-batch was seen {seen} of {TRACES} times"
        self.compared, self.replayed = self.compared + verify, self.replayed + (not verify)
        record, watch = forwards.record, self._kinds.watch
        assert record is not None
        assert watch is not None
        keys = record.traced.drawn(self._training.mesh)
        call = FoldedCall(
            training=self._training,
            record=record,
            step=self._training.counters.global_steps,
            context=ForwardContext.now(self._training.module, watch),
            again=functools.partial(self._again, tracer=forwards.tracer),
            backward=functools.partial(self._backward, forwards=forwards, verify=verify),
            trained=self._trained,
        )
        outputs = call(tensors, keys)
        self._in_program = True
        return record.output.filled(outputs)

    def _backward(
        self,
        call: FoldedCall,
        saved: Sequence[torch.Tensor],
        grads: dict[int, torch.Tensor],
        *,
        forwards: _Forwards,
        verify: bool,
    ) -> None:
        store = self._training.gradients
        # An earlier pass comes first, as in a traced step.
        store.settle()
        traced = store.keeps_local or call.repeated is not None
        pattern = (*grads, *arrays.shapes_of([*grads.values()]))
        trust = forwards.backwards.setdefault(pattern, Trust())
        inputs = [*saved, *grads.values()]
        if not traced and (verify or trust.record is None) and not trust.given_up:
            with self._launching.programs.own_reads():
                outcome = forwards.tracer.fold_backward(
                    call.record, inputs, tuple(grads), around=call.context, path=store.path
                )
                reason = trust.judge(outcome)
            if reason is not None:
                forwards.given_up = reason
                self._kinds.say_python(logging.WARNING, "at every step from now on", reason)
        if traced or trust.record is None:
            forward, call.repeated = call.repeated or call.again(call, saved), None
            forwards.tracer.backward(forward, grads, folds=False)
            return
        record = trust.record
        if not store.can_hold:
            self._record(record, inputs)
            return
        kept = compiler.keep(inputs, first=store.settle)
        store.held = HeldBackward(
            names=record.labels,
            function=record.function,
            kept=kept,
            record=lambda: self._record(record, compiler.tensors(kept)),
        )

    def _record(self, backward: TracedFunction, inputs: Sequence[torch.Tensor]) -> None:
        store = self._training.gradients
        for name, value in zip(backward.labels, backward.function(inputs), strict=True):
            store.add_reduced(name, value)

    def _again(
        self, call: FoldedCall, saved: Sequence[torch.Tensor], *, tracer: PassTracer
    ) -> Forward:
        end, store = len(saved) - call.record.traced.keys, self._training.gradients
        return tracer.again(
            saved[:end],
            saved[end:],
            store.add_global if self._training.region is None else store.add_local,
            around=call.context,
            new=self._new_key,
        )

    def _new_key(self, value: int) -> torch.Tensor:
        return self._training.mesh.place(key_of(value))

    def _refusal(self) -> str | None:
        if current().compiler is None:
            return _RECORDS
        refusal = self._kinds.refusal()
        if self._kinds.watch is not self._watch:
            # A change of what is watched forgets kinds, and so the programs that begin as they do.
            self._watch = self._kinds.watch
            self.ends.forget()
        if refusal is not None:
            return refusal
        if not any(parameter.requires_grad for parameter in self._kinds.parameters):
            return "no parameter requires a gradient"
        return None

    def _find(
        self, kinds: KnownKinds, args: Any, kwargs: dict[str, Any]
    ) -> tuple[_Forwards, Sequence[torch.Tensor]]:
        """The compared traces of forwards of this kind, and the tensors of this one's inputs."""
        try:
            form = InputForm.of(args, kwargs)
        except UnknownInputError as error:
            raise NotCapturableError(str(error)) from error
        known = kinds.find(form.form, _Forwards)
        if not known.ready:
            # A new tracer, as an earlier trace may have changed the module.
            known.tracer = PassTracer(self._training, args, kwargs)
        return known, form.tensors


def _verify(kinds: KnownKinds, forwards: _Forwards, tensors: Sequence[torch.Tensor]) -> bool:
    """Compares a forward whose kind isn't known yet with earlier ones; whether it had to.

    Raises:
        NotCapturableError: it differs, or the kind was given up before.
    """
    if forwards.given_up is not None:
        raise NotCapturableError(forwards.given_up)
    if forwards.ready:
        return False
    reason = kinds.compare(forwards, lambda: forwards.tracer.fold(tensors))
    if reason is not None:
        forwards.backwards.clear()
        raise NotCapturableError(reason)
    return True
