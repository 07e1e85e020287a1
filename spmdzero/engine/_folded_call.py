"""One call of a folded forward: a node of autograd, and what its backward needs."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmdzero.backend import arrays, hands_over
from spmdzero.engine._folded_forward import FoldedPass, Forward, ForwardContext
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._training import Training

_WRITTEN = (
    "a parameter or input was written between engine(...) and the backward of its loss. Call "
    'backward before step, or set "spmd": {"capture": false}, which keeps the values that the '
    "forward saw"
)
_FREED = (
    "Trying to backward through the graph a second time: the first backward has freed what this "
    "one needs. Specify retain_graph=True in the first"
)
_ASKED = (
    "torch.autograd.grad, or backward(inputs=...), is asked for gradients of parameters, which a "
    'captured forward hands to its engine only. Set "spmd": {"capture": false}, or, if they are '
    "not to be differentiated, call engine.backward(loss) and read parameter.grad"
)


# A node saves it, so that torch can tell whether a pass frees what its nodes have saved.
_NOTHING = torch.empty(0)


class Trained:
    """Has one tensor stand for the trained parameters in autograd's graph.

    A node with an edge to each parameter, at each step, costs more than all else of a call.
    """

    def __init__(self) -> None:
        self._leaves: list[torch.Tensor] = []
        self._all = _NOTHING

    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor behind which are the trained leaves among `tensors`, and trained others."""
        # A subclass of torch's tensors would run Python for each of them, at each step.
        with torch._C.DisableTorchFunctionSubclass():
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            leaves = [tensor for tensor in trained if tensor.is_leaf]
            others = [tensor for tensor in trained if not tensor.is_leaf]
        if [*map(id, leaves)] != [*map(id, self._leaves)]:
            standing: Any = _Standing.apply(*leaves) if leaves else _NOTHING
            self._leaves, self._all = leaves, standing
        return [self._all, *others]


class _Standing(torch.autograd.Function):
    # It lives from step to step, so it saves nothing that a pass could free.
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


@dataclasses.dataclass(kw_only=True, eq=False)
class FoldedCall:
    """One call of a folded forward, kept until its backward.

    A folded backward computes the forward's values that it needs once more, which is free in the
    program that also holds the forward. If a different program comes in between, such as another
    engine's step, `keep` makes that program compute them.

    In torch, outputs that share no operation have a node each, and a backward each without
    `retain_graph`; so have the outputs of a call until the next program starts.

    Attributes:
        training: the training of the engine.
        record: the folded forward.
        step: the engine's `global_steps` at the call.
        context: everything that the forward depends on beside its inputs.
        again: takes this call and the forward's arguments (tensors, then keys); traces the forward
            for `backward`.
        backward: takes this call, the forward's arguments, and the gradient of each output that has
            one, by its index; adds the parameters' gradients to the engine's.
        trained: has one tensor stand for the parameters.
        repeated: the forward that `again` returned, None unless it was kept.
    """

    training: Training
    record: FoldedPass
    step: int
    context: ForwardContext
    again: Callable[["FoldedCall", Sequence[torch.Tensor]], Forward]
    backward: Callable[["FoldedCall", Sequence[torch.Tensor], dict[int, torch.Tensor]], None]
    trained: Trained
    repeated: Forward | None = None
    _node: Callable[[], Any] = lambda: None
    # The forward's arguments and their versions; None once no backward may come.
    _saved: tuple[Sequence[torch.Tensor], list[int]] | None = None
    # The outputs that had their gradient in a pass that freed its graph.
    _spent: set[int] = dataclasses.field(default_factory=set)

    def save(self, tensors: Sequence[torch.Tensor], node: Any) -> None:
        """Keeps the forward's arguments for its backward, as long as autograd's `node` lives."""
        self._saved, self._node = (tensors, _versions(tensors)), weakref.ref(node)

    def pass_on(self, given: dict[int, torch.Tensor], *, frees: Callable[[], bool]) -> None:
        """Runs the backward of the outputs `given`, whose gradients these are.

        Args:
            given: index of an output -> its gradient.
            frees: whether the pass frees its graph, asked afterwards.

        Raises:
            RuntimeError: an earlier pass freed what this one needs.
            SpmdZeroUsageError: an argument of the forward was written since.
        """
        if self._saved is None or not self._spent.isdisjoint(given):
            raise RuntimeError(_FREED)
        saved, versions = self._saved
        spent = self.step != self.training.counters.global_steps
        if spent or versions != _versions(saved):
            raise SpmdZeroUsageError(_WRITTEN)
        _waiting.discard(self)
        self.backward(self, saved, given)
        if not frees():
            return
        self._spent.update(given)
        if self._spent.issuperset(self.record.flowing):
            self._saved = None
        else:
            _leaving.add(self)

    def forget(self) -> None:
        """Frees the arguments that `pass_on` left, which would be outputs of the next program."""
        self._saved = None

    def keep(self) -> None:
        """Makes the pending program compute and keep the values that the backward needs.

        It does nothing if the engine's step has ended or the forward's tensors were written
        meanwhile; the backward refuses both.

        Raises what the module's forward raises.
        """
        spent = self.step != self.training.counters.global_steps
        if self._node() is None or self._saved is None or spent or self.repeated is not None:
            return
        saved, versions = self._saved
        if versions == _versions(saved):
            self.repeated = self.again(self, saved)

    def __call__(
        self, tensors: list[torch.Tensor], keys: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the outputs, and writes the parameters and buffers that the forward writes.

        Args:
            tensors: parameters, buffers and inputs.
            keys: keys of the random draws.
        """
        outputs: Any = _Folded.apply(self, tensors, keys, *self.trained.of(tensors))
        _waiting.add(self)
        return outputs


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._version for tensor in tensors]


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
    # Autograd sees what stands for the trained tensors, so that a request for any of their
    # gradients leads here. All others are in a list, which autograd doesn't see.
    leaves_region = True

    @staticmethod
    def forward(
        ctx: Any,
        call: FoldedCall,
        tensors: list[torch.Tensor],
        keys: list[torch.Tensor],
        *trained: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        record, training, saved = call.record, call.training, list(tensors)
        if record.written:
            # The backward pass takes the written tensors as the forward found them.
            places = {id(tensor): place for place, tensor in enumerate(tensors)}
            module = training.module
            own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name in record.written:
                saved[places[id(own[name])]] = arrays.fresh(own[name])
        outputs = record.settled(training, tensors, keys)
        training.forward.note_folded()
        ctx.save_for_backward(_NOTHING)
        ctx.call, ctx.hooked = call, False
        call.save([*saved, *keys], ctx)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, flows in zip(outputs, record.differentiable, strict=True) if not flows)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        if hands_over(some=True):
            raise SpmdZeroUsageError(_ASKED)

        def frees() -> bool:
            ctx.maybe_clear_saved_tensors()
            return _is_freed(ctx)

        given = {index: grad for index, grad in enumerate(grads) if grad is not None}
        ctx.call.pass_on(given, frees=frees)
        return (None,) * len(ctx.needs_input_grad)


def _is_freed(ctx: Any) -> bool:
    try:
        return not ctx.saved_tensors
    except RuntimeError:
        return True


def _noting(name: str) -> Callable[[Any, Any], Any]:
    """The method of a folded forward's node that registers a hook; the node notes that it has."""
    register = getattr(_NODE, name)

    def noted(ctx: Any, hook: Any) -> Any:
        ctx.hooked = True
        return register(ctx, hook)

    return noted


_NODE: Any = _Folded._backward_cls  # type: ignore[missing-attribute]
for _name in ("register_hook", "register_prehook"):
    setattr(_NODE, _name, _noting(_name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectPass:
    """The backward pass of an output of a folded forward, without autograd.

    autograd would visit each trained parameter, only to find that it has no gradient for it.

    Attributes:
        call: the call of the forward.
        index: the output.
    """

    call: FoldedCall
    index: int

    @classmethod
    def of(cls, loss: torch.Tensor, training: Training) -> "DirectPass | None":
        """The pass of `loss`, or None if the pass is autograd's.

        That is so if `loss` is computed from what a forward of the engine returned, or if there is
        a hook on the way of its gradient.
        """
        # A subclass of torch's tensors would run Python for each of these attributes.
        with torch._C.DisableTorchFunctionSubclass():
            node: Any = loss.grad_fn
            if type(node) is not _NODE or node.call.training is not training or node.hooked:
                return None
            # One hook is the engine's own.
            if len(loss._backward_hooks or ()) != 1 or loss.retains_grad:
                return None
            return cls(call=node.call, index=loss.output_nr)

    def run(self, grad: torch.Tensor, *, retain_graph: bool) -> None:
        """Runs the pass; the arguments are those of torch's backward."""
        with torch.no_grad():
            self.call.pass_on({self.index: grad}, frees=lambda: not retain_graph)
