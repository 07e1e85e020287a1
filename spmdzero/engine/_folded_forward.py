"""A folded forward and its backward: two operations, and one node of autograd."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from spmdzero.backend import (
    Passage,
    Region,
    Skeleton,
    UnknownContentError,
    arrays,
    compiler,
    current,
    found,
    hands_over,
)
from spmdzero.backend.pure import GeneratorWatch, ImpureError, ModuleWatch, attempt
from spmdzero.engine._kinds import NotCapturableError, autocast_dtype
from spmdzero.engine._module_tracer import (
    KeySource,
    ModuleTracer,
    TracedFunction,
    fold_forward,
    refuse_read,
)
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._training import Training
from spmdzero.step._gradient_path import GradientPath

_WRITTEN = (
    "a parameter or input was written between engine(...) and the backward of its loss. Call "
    'backward before step, or set "spmd": {"capture": false}, which keeps the values that the '
    "forward saw"
)
_ASKED = (
    "torch.autograd.grad, or backward(inputs=...), is asked for gradients of parameters, which a "
    'captured forward hands to its engine only. Set "spmd": {"capture": false}, or, if they are '
    "not to be differentiated, call engine.backward(loss) and read parameter.grad"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """A module's attributes and modes, and torch's autocast and default dtype, at a forward.

    Attributes:
        module: the module whose forward it was.
        watch: the module's state at the forward.
        autocast: dtype of `torch.autocast` on the devices, None if it was off.
        default: torch's default dtype.
    """

    module: nn.Module
    watch: ModuleWatch
    autocast: torch.dtype | None
    default: torch.dtype

    @classmethod
    def now(cls, module: nn.Module, watch: ModuleWatch) -> "ForwardContext":
        """The context of a forward that is about to run; `watch` has just seen no change."""
        return cls(
            module=module,
            watch=watch,
            autocast=autocast_dtype(),
            default=torch.get_default_dtype(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the forward's context inside, and the present one afterwards."""
        default, after = torch.get_default_dtype(), None
        if self.watch.change():
            after = ModuleWatch(self.module, {})
            self.watch.restore()
        torch.set_default_dtype(self.default)
        on = self.autocast is not None
        try:
            with torch.autocast(current().device_type, dtype=self.autocast, enabled=on):
                yield
        finally:
            torch.set_default_dtype(default)
            if after is not None:
                after.restore()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedPass:
    """The forward of one kind of input.

    Attributes:
        traced: parameters, buffers, inputs and keys -> outputs, written tensors, flags.
        output: what the module returned, without its tensors.
        differentiable: whether each output carries a gradient.
        written, flags: names of parameters and buffers, and of flags, that the forward writes.
    """

    traced: TracedFunction
    output: Skeleton
    differentiable: tuple[bool, ...]
    written: tuple[str, ...]
    flags: tuple[str, ...]

    def difference(self, other: "FoldedPass") -> str | None:
        """How `other` differs from this forward, or None if they are the same."""
        return self.traced.difference(other.traced)


class PassTracer(ModuleTracer):
    """Traces a forward in the replica region, and its backward."""

    @property
    def _region(self) -> Region:
        assert isinstance(self.forward, Region)
        return self.forward

    def fold(self, tensors: Sequence[torch.Tensor]) -> FoldedPass:
        """Folds the forward, without drawing from a generator.

        Args:
            tensors: `state` and the inputs.

        Raises:
            NotCapturableError: it can't be one operation.
        """
        made: list[tuple[Passage, Skeleton, list[torch.Tensor]]] = []

        def function(tensors: list[torch.Tensor], key: KeySource) -> list[torch.Tensor]:
            passage = self.passage(tensors, key=key, sink=_ignore)
            output, flat = _taken_apart(passage.output)
            made.append((passage, output, flat))
            return [*flat, *passage.written.values(), *passage.flags.values()]

        traced = fold_forward(function, tensors, known=self.known(self.state))
        ((passage, output, flat),) = made
        if traced.draws != tuple(range(len(traced.draws))) or self._region.recomputes:
            raise NotCapturableError("activation checkpointing runs the forward again in backward")
        differentiable = tuple(tensor.requires_grad for tensor in flat)
        written, flags = tuple(passage.written), tuple(passage.flags)
        return FoldedPass(
            traced=traced.labelled(output, differentiable, written, flags),
            output=output,
            differentiable=differentiable,
            written=written,
            flags=flags,
        )

    def again(
        self,
        tensors: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        sink: Any,
        *,
        around: ForwardContext,
    ) -> Passage:
        """Traces the forward once more for its backward, which hands the gradients to `sink`.

        The program has the forward's operations twice, and the compiler keeps one of each.

        Args:
            tensors, keys: the forward's arguments.
            sink: takes a parameter's name and its gradient.
            around: the forward's context.
        """
        left = iter(keys)
        # The forward's draws were made when it ran first, and must not move the generator again.
        state = torch.get_rng_state()
        try:
            # Uploads are recorded only so that fixed values are read as in the forward.
            with torch.enable_grad(), around.restored(), compiler.record_uploads():
                return self.passage(
                    [t.detach() for t in tensors], key=lambda _: next(left), sink=sink
                )
        finally:
            torch.set_rng_state(state)

    def fold_backward(
        self,
        record: FoldedPass,
        inputs: Sequence[torch.Tensor],
        differentiated: tuple[int, ...],
        *,
        around: ForwardContext,
        path: GradientPath,
    ) -> TracedFunction | ImpureError:
        """Folds a backward, or returns why it can't be folded; draws and changes nothing.

        The folded function's labels are the parameters whose gradients it returns.

        Args:
            record: the forward.
            inputs: the forward's arguments, its keys, and the gradients of outputs.
            differentiated: the indices of the outputs that have these gradients.
            around: the forward's context.
            path: the path of gradients to the optimizer.
        """
        names: list[str] = []

        def function(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            end = len(tensors) - len(differentiated)
            keys, found = end - record.traced.keys, list[torch.Tensor]()

            def sink(name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
                if path.is_trained(name):
                    names.append(name)
                    found.append(grad if waits else path.of_replica(name, grad))

            passage = self.again(tensors[:keys], tensors[keys:end], sink, around=around)
            given = dict(zip(differentiated, tensors[end:], strict=True))
            self.backward(passage, given, folds=True)
            if not found:
                raise NotCapturableError("no parameter has a gradient")
            return found

        def fold_it() -> TracedFunction:
            known = record.traced.function.constants
            folded = compiler.fold(function, inputs).sharing(known, compiler.same_value)
            generators.places_of([], who="the backward")
            return TracedFunction(function=folded, labels=tuple(names))

        with GeneratorWatch() as generators:
            watch = ModuleWatch(around.module, {})
            return attempt(fold_it, watch=watch, who="the backward")

    def backward(self, passage: Passage, grads: Mapping[int, torch.Tensor], *, folds: bool) -> None:
        """Runs the backward pass of the passage that `again` returned.

        Args:
            passage: a traced forward.
            grads: index of an output -> its gradient of the loss.
            folds: whether the tensors are stand-ins.

        Raises:
            NotCapturableError: with `folds`, if the pass can't be one operation.
        """
        outputs = found(passage.output, torch.Tensor)
        refusing: Any = {"key": _refuse_draw, "read": refuse_read} if folds else {}
        with self._region.backward(passage.state, **refusing):
            arrays.backward([outputs[index] for index in grads], list(grads.values()))
        if folds:
            self.refuse_reads()


def _taken_apart(output: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """A forward's output without its tensors, and the tensors.

    Raises:
        NotCapturableError: a later forward's may be another.
    """
    try:
        skeleton, tensors = Skeleton.of(output)
    except UnknownContentError as error:
        raise NotCapturableError(f"an output is {error}") from None
    if not tensors:
        raise NotCapturableError("the forward returns no tensor")
    if not all(map(arrays.is_mine, tensors)):
        raise NotCapturableError(
            "the forward returns a tensor on the CPU, which may be another at each call"
        )
    return skeleton, tensors


def _ignore(name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
    pass


def _refuse_draw(_: int) -> NoReturn:
    raise NotCapturableError("what runs in backward draws random numbers")


@dataclasses.dataclass(kw_only=True, eq=False)
class FoldedCall:
    """One call of a folded forward, kept until its backward.

    A folded backward computes the forward's values that it needs once more, which is free in the
    program that also holds the forward. If a different program comes in between, such as another
    engine's step, `keep` makes that program compute them.

    Attributes:
        training: the training of the engine.
        record: the folded forward.
        step: the engine's `global_steps` at the call.
        context: everything that the forward depends on beside its inputs.
        again: takes this call and the forward's arguments (tensors, then keys); traces the forward
            for `backward`.
        backward: takes this call, the forward's arguments, and the gradient of each output that has
            one, by its index; adds the parameters' gradients to the engine's.
        passage: the passage that `again` returned, None unless it was kept.
    """

    training: Training
    record: FoldedPass
    step: int
    context: ForwardContext
    again: Callable[["FoldedCall", Sequence[torch.Tensor]], Passage]
    backward: Callable[["FoldedCall", Sequence[torch.Tensor], dict[int, torch.Tensor]], None]
    passage: Passage | None = None
    _node: Callable[[], Any] = lambda: None
    _spent: set[int] = dataclasses.field(default_factory=set)
    _left: tuple[Sequence[torch.Tensor], list[int]] | None = None

    def leave(self, saved: Sequence[torch.Tensor], given: Collection[int]) -> None:
        """Notes the outputs that have had their gradient, and keeps `saved` for the others.

        autograd frees what a node has saved with its first backward. In torch, outputs that share
        no operation have a node each, and a backward each without `retain_graph`.
        """
        self._spent.update(given)
        flowing = {index for index, flows in enumerate(self.record.differentiable) if flows}
        self._left = None
        if flowing - self._spent:
            self._left = saved, [tensor._version for tensor in saved]
            _leaving.add(self)

    def left(self, given: Collection[int]) -> Sequence[torch.Tensor] | None:
        """The tensors that `leave` kept, or None if it kept none or an output had its gradient.

        Raises:
            SpmdZeroUsageError: a kept tensor was written since.
        """
        if self._left is None or not self._spent.isdisjoint(given):
            return None
        saved, versions = self._left
        if versions != [tensor._version for tensor in saved]:
            raise SpmdZeroUsageError(_WRITTEN)
        return saved

    def forget(self) -> None:
        """Frees the tensors that `leave` kept, which would be outputs of the next program."""
        self._left = None

    def keep(self) -> None:
        """Makes the pending program compute and keep the values that the backward needs.

        It does nothing if the engine's step has ended or the forward's tensors were written
        meanwhile; the backward refuses both.

        Raises what the module's forward raises.
        """
        node = self._node()
        spent = self.step != self.training.counters.global_steps
        if node is None or spent or self.passage is not None:
            return
        try:
            saved = node.saved_tensors
        except RuntimeError:
            return
        self.passage = self.again(self, saved)

    def __call__(
        self, tensors: list[torch.Tensor], keys: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the outputs, and writes the parameters and buffers that the forward writes.

        Args:
            tensors: parameters, buffers and inputs.
            keys: keys of the random draws.
        """
        # A subclass of torch's tensors would run Python for each of them, at each step.
        with torch._C.DisableTorchFunctionSubclass():
            trained = [tensor for tensor in tensors if tensor.requires_grad]
        outputs: Any = _Folded.apply(self, tensors, keys, *trained)
        _waiting.add(self)
        return outputs


# Forwards of all engines: those whose backward is still to come, and those with some outputs that
# have had their gradient and some that haven't.
_waiting: "weakref.WeakSet[FoldedCall]" = weakref.WeakSet()
_leaving: "weakref.WeakSet[FoldedCall]" = weakref.WeakSet()


def keep_waiting(*, ending: Training | None) -> None:
    """Makes the program that is about to start compute the values that later backwards need.

    Args:
        ending: the training whose step ends with this program; its forwards are spent.
    """
    for call in [*_waiting]:
        if call.training is not ending:
            call.keep()
    while _leaving:
        _leaving.pop().forget()


class _Folded(torch.autograd.Function):
    # Autograd sees the trained tensors, so that a request for any of their gradients leads here.
    # The others are in a list, which autograd doesn't see.
    leaves_region = True

    @staticmethod
    def forward(
        ctx: Any,
        call: FoldedCall,
        tensors: list[torch.Tensor],
        keys: list[torch.Tensor],
        *trained: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        record, training = call.record, call.training
        values = record.traced.function([*tensors, *keys])
        count, written = len(record.differentiable), len(record.written)
        outputs, rest = values[:count], values[count:]
        if record.written:
            # The backward pass takes the written tensors as the forward found them.
            places = {id(tensor): place for place, tensor in enumerate(tensors)}
            module = training.module
            own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            tensors = list(tensors)
            for name in record.written:
                tensors[places[id(own[name])]] = arrays.fresh(own[name])
        assert training.region is not None
        training.region.settle(
            written=dict(zip(record.written, rest[:written], strict=True)),
            flags=dict(zip(record.flags, rest[written:], strict=True)),
        )
        training.region.note_folded()
        ctx.save_for_backward(*tensors, *keys)
        ctx.call = call
        call._node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, flows in zip(outputs, record.differentiable, strict=True) if not flows)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        call: FoldedCall = ctx.call
        if hands_over(some=True):
            raise SpmdZeroUsageError(_ASKED)
        given = {index: grad for index, grad in enumerate(grads) if grad is not None}
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" in str(error):
                raise SpmdZeroUsageError(_WRITTEN) from error
            if (saved := call.left(given)) is None:
                raise
        if call.step != call.training.counters.global_steps:
            raise SpmdZeroUsageError(_WRITTEN)
        _waiting.discard(call)
        call.backward(call, saved, given)
        call.leave(saved, given)
        return (None,) * len(ctx.needs_input_grad)
