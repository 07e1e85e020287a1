"""Decides what is known of a forward that comes, so that its Python need not run."""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from spmdzero.backend.pure import ModuleWatch, attempt
from spmdzero.engine._clients_optimizer import has_step_hooks
from spmdzero.engine._kinds import Kind, Trust
from spmdzero.engine._launching import Launching
from spmdzero.state._training import Training

# Number of kinds of micro-batch that are kept; they differ in inputs, modes, frozen parameters.
_MOST_KINDS = 64
OBSERVED = "somebody reads the step's program"
"""The reason if an audit, a record of ledgers or a profile observes the step."""
logger = logging.getLogger("spmdzero")
TrustT = TypeVar("TrustT", bound=Trust)


class KnownKinds:
    """The record of each kind, for as long as the module stays as it was when it was traced.

    `train_batch` and the three calls share it: a kind has the same record in both.

    Args:
        training: the training of the engine.
        launching: knows who observes its programs, and which hooks run around its calls.

    Attributes:
        kinds: the latest 64 kinds, each with its record.
        watch: the watch of the module, None before the first `refusal`.
    """

    def __init__(self, training: Training, launching: Launching) -> None:
        self._training, self._launching = training, launching
        self.watch: ModuleWatch | None = None
        self._said: set[str] = set()
        self.kinds: dict[Kind, Trust[Any]] = {}

    @property
    def _call(self) -> str:
        """The call that runs the model's Python, as messages have it."""
        return "train_batch" if self._training.in_train_batch else "engine(...)"

    def recheck(self) -> None:
        """Makes the next of each kind be traced once more, and compared."""
        for known in self.kinds.values():
            known.recheck()

    def refusal(self) -> str | None:
        """Why what comes has to be traced, whatever its kind, or None.

        It looks at the module, and forgets all kinds if that has changed.
        """
        off = self._off()
        if off is not None:
            return off
        change = self.watch.change() if self.watch is not None else None
        if change is not None:
            self.kinds.clear()
            message = f"{self._call} compiles its programs again, as the model has changed: %s"
            self.say(logging.INFO, message, change)
        if self.watch is None or change is not None:
            self.watch = self._look()
        if self.watch.hook is not None:
            return f"Python has to run at each step: {self.watch.hook}"
        return self.blocked()

    def _off(self) -> str | None:
        return None if self._training.spmd_config.spmd.capture else '"spmd": {"capture": false}'

    def blocked(self) -> str | None:
        """Why what comes has to be traced, as far as the module and its attributes don't decide."""
        training, launching = self._training, self._launching
        off = self._off()
        if off is not None:
            return off
        if launching.observers:
            return OBSERVED
        if training.spmd_config.wall_clock_breakdown:
            return "wall_clock_breakdown times forward, backward and step apart"
        if any(launching.hooks) or nn.modules.module._has_any_global_hook():
            return "a hook of the engine, or of all modules, has to run at each step"
        # A subclass of torch's tensors would run Python for each parameter, at each step.
        with torch._C.DisableTorchFunctionSubclass():
            if [p for p in self.parameters if p._backward_hooks or p._post_accumulate_grad_hooks]:
                return "a parameter has a gradient hook"
        if training.optimizer is not None and has_step_hooks(training.optimizer):
            return "a hook of the optimizer has to run at each step"
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            return "a torch dispatch or function mode watches operations"
        if torch.is_anomaly_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False):
            return "autograd is watched, by detect_anomaly or saved_tensors_hooks"
        return None if torch.is_grad_enabled() else "autograd is off"

    def _look(self) -> ModuleWatch:
        training = self._training
        others = {"the optimizer's state": training.state.slots} if training.optimizer else {}
        return ModuleWatch(training.module, others)

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The module's parameters, as the watch saw them."""
        return self.watch.parameters if self.watch is not None else ()

    def find(self, form: Hashable, new: Callable[[], TrustT]) -> TrustT:
        """The record of the kind that comes, which `new` makes if there is none.

        Args:
            form: form of the inputs, see `InputForm`.
        """
        kind = Kind.of(self._training, form=form, parameters=self.parameters)
        known: Any = self.kinds.get(kind)
        if known is not None:
            return known
        if any(known.ready for known in self.kinds.values()):
            message = f"{self._call} compiles one more program: %s"
            reason = "inputs of other shapes, dtypes, shardings or values, or another mode"
            self.say(logging.INFO, message, reason)
        if len(self.kinds) == _MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]
        self.kinds[kind] = known = new()
        return known

    def compare(self, known: Trust[Any], trace: Callable[[], Any]) -> str | None:
        """Traces what comes and compares it with the latest of its kind.

        Returns why it can't stand for later ones, or None.
        """
        with self._launching.programs.own_reads():
            assert self.watch is not None
            outcome = attempt(trace, watch=self.watch, who="the forward")
            reason = known.judge(outcome)
        if known.given_up is not None:
            self.say_python(logging.WARNING, "at every step from now on", known.given_up)
        return reason

    def accept_changes(self) -> None:
        """Accepts the changes that a trace made to the module, as each step makes them."""
        if self.watch is not None and self.watch.change():
            self.watch = self._look()
            self.kinds = {key: k for key, k in self.kinds.items() if not k.ready}

    def say_why(self, reason: str, *, always: bool) -> None:
        """Logs why this step, or each one, runs the model's Python, unless asked for."""
        if self._training.spmd_config.spmd.capture:
            # A caller that reads a step's program knows that the step is traced for it.
            level = logging.DEBUG if reason == OBSERVED else logging.INFO
            self.say_python(level, "at every step" if always else "in this step", reason)

    def say_python(self, level: int, when: str, reason: str) -> None:
        """Logs that the model's Python runs, ``"in this step"`` or so, and why."""
        message = f"{self._call} runs the model's Python {when}"
        self.say(
            level, f"{message}, which takes longer than to start what was compiled: %s", reason
        )

    def say(self, level: int, message: str, reason: str) -> None:
        """Logs `message` with `reason`, once for each attribute and not for each of its values."""
        about = message + reason.split(":")[0]
        if about not in self._said:
            self._said.add(about)
            logger.log(level, message, reason)
