"""Kinds of micro-batch: what tells them apart, what is known of each, and how far it is trusted."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from spmdzero.backend import (
    TENSORS,
    Batch,
    UnknownContentError,
    current,
    form_of,
    refuse_unknown,
)
from spmdzero.backend.pure import ImpureError, ModuleWatch, attempt
from spmdzero.config import BatchSizes
from spmdzero.engine._clients_optimizer import has_step_hooks
from spmdzero.engine._launching import Launching
from spmdzero.state._training import Training
from spmdzero.step._numbers import fixed_numbers

# Number of traces that must be equal before one is used for later steps.
TRACES = 3
# Number of unusable traces in a row after which a kind gets no more comparisons.
_FAILURES = 4


class NotCapturableError(ImpureError):
    """Says why a trace can't be used for later steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Everything that a compiled program depends on, except the watched structure of the module.

    Attributes:
        form: form of the inputs, see `InputForm`.
        requires_grad: `requires_grad` of each parameter.
        batch: the batch sizes, which with the config decide the plan.
        groups: the ids of the parameters of each param group.
        numbers: the numbers of the groups that are constants of the program.
        reset_at: the counts of updates that parameters' own counts start from, constants too.
        default: torch's default dtype.
        autocast: dtype of `torch.autocast` on the devices, None if it is off.
    """

    form: Hashable
    requires_grad: tuple[bool, ...]
    batch: BatchSizes
    groups: Hashable
    numbers: Hashable
    reset_at: Hashable
    default: torch.dtype
    autocast: torch.dtype | None

    @classmethod
    def of(
        cls,
        training: Training,
        *,
        form: Hashable,
        parameters: Iterable[torch.Tensor],
    ) -> "Kind":
        """The kind of the micro-batch or forward that `training` is about to run."""
        optimizer = training.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        # A subclass of torch's tensors would run Python for each parameter, at each step.
        with torch._C.DisableTorchFunctionSubclass():
            trained = tuple([parameter.requires_grad for parameter in parameters])
        return cls(
            form=form,
            requires_grad=trained,
            batch=training.batch,
            groups=tuple([tuple(map(id, group["params"])) for group in groups]),
            numbers=fixed_numbers(optimizer._rules, groups) if optimizer is not None else None,
            reset_at=tuple(optimizer.reset_at.items()) if optimizer is not None else None,
            default=torch.get_default_dtype(),
            autocast=autocast_dtype(),
        )


def autocast_dtype() -> torch.dtype | None:
    """The dtype of `torch.autocast` on the devices, None if it is off."""
    devices = current().device_type
    return torch.get_autocast_dtype(devices) if torch.is_autocast_enabled(devices) else None


class Comparable(Protocol):
    """The result of a trace, which can be compared with another result."""

    def difference(self, other: Any) -> str | None:
        """How `other` differs from this result, or None if they are the same."""


Traced = TypeVar("Traced", bound=Comparable)


@dataclasses.dataclass(kw_only=True)
class Trust(Generic[Traced]):
    """The results of comparing the traces of one kind.

    Attributes:
        record: the first of the equal traces; None if the latest trace can't be used.
        equal: number of traces in a row that were the same.
        failures: number of traces in a row that were not.
        given_up: why no more traces are compared, or None.
    """

    record: Traced | None = None
    equal: int = 0
    failures: int = 0
    given_up: str | None = None

    @property
    def ready(self) -> bool:
        """Whether later micro-batches need no trace."""
        return self.equal >= TRACES

    def recheck(self) -> None:
        """Makes the next micro-batch be traced once more, and compared."""
        self.equal = min(self.equal, TRACES - 1)

    def forgive(self) -> None:
        """Takes back the latest failure: the plain run raised too, so the error is the user's."""
        if self.failures < _FAILURES:
            self.failures = max(0, self.failures - 1)

    def judge(self, outcome: Traced | ImpureError) -> str | None:
        """Takes note of a trace; returns why it can't be used for others, or None."""
        if isinstance(outcome, ImpureError):
            reason, self.equal, self.record = str(outcome), 0, None
        else:
            known = self.record
            reason = known.difference(outcome) if known is not None else None
            self.equal = self.equal + 1 if reason is None else 1
            # Each record has constants of its own, and two records in one step would need a
            # different program.
            if known is None or reason is not None:
                self.record = outcome
        self.failures = 0 if reason is None else self.failures + 1
        if self.failures == _FAILURES:
            self.given_up = reason
        return reason


@contextlib.contextmanager
def errors_are_the_users(trust: Trust[Any] | None) -> Iterator[None]:
    """Surrounds a plain run after a failed trace: an error raised inside it is the user's."""
    try:
        yield
    except BaseException:
        if trust is not None:
            trust.forgive()
        raise


class UnknownInputError(TypeError):
    """Raised for an input whose value can't be compared between steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputForm:
    """The inputs of one forward, placed on the devices.

    Attributes:
        form: containers and their attributes, values that are no tensors, and each tensor's shape,
            dtype and batch dim.
        tensors: the tensors, in the order of `form`.
    """

    form: Hashable
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "InputForm":
        """The form of placed inputs.

        Raises:
            UnknownInputError: an input requires a gradient, or is neither a container nor a plain
                value.
        """
        form, tensors = _taken_apart((args, dict(kwargs)))
        return cls(form=form, tensors=tuple(tensors))


def _taken_apart(tree: Any) -> tuple[Hashable, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def leaf(given: Any) -> Hashable:
        tensor = given if isinstance(given, torch.Tensor) else given.tensor
        if tensor.requires_grad:
            raise UnknownInputError("an input requires a gradient")
        tensors.append(tensor)
        rows = (given.dim, given.shared, given.joined) if isinstance(given, Batch) else None
        return rows, tensor.shape, tensor.dtype

    try:
        # A subclass of torch's tensors would run Python for each attribute.
        with torch._C.DisableTorchFunctionSubclass():
            return form_of(tree, TENSORS, leaf, refuse_unknown), tensors
    except UnknownContentError as error:
        raise UnknownInputError(f"an input is {error}") from None
    except RecursionError:
        raise UnknownInputError("an input is a container that holds itself") from None


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
        gradients: whether autograd records the forwards. Nothing is logged of others.

    Attributes:
        kinds: the latest 64 kinds, each with its record.
        watch: the watch of the module, None before the first `refusal`.
    """

    def __init__(self, training: Training, launching: Launching, *, gradients: bool = True) -> None:
        self._training, self._launching, self._gradients = training, launching, gradients
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
        return "autograd is off" if self._gradients and not torch.is_grad_enabled() else None

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
        if self._gradients and about not in self._said:
            self._said.add(about)
            logger.log(level, message, reason)
