"""One folded forward as autograd sees it: one node, whose backward pass is folded too."""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from spmdzero.backend import Passage, arrays, hands_over
from spmdzero.engine._folded_pass import FoldedPass
from spmdzero.engine._folded_surroundings import Surroundings
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._training import Training

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


@dataclasses.dataclass(kw_only=True, eq=False)
class FoldedCall:
    """A folded forward, until its backward.

    A folded backward computes what it needs of the forward once more, which is free in the program
    that also holds the forward. Where another program comes in between, as another engine's step,
    `keep` has that one compute it.

    Attributes:
        training: whose.
        record: what is called.
        step: its count of steps then.
        surroundings: what the forward depends on beside its inputs.
        again: takes this and what the forward took (tensors, then keys); traces it for `backward`.
        backward: takes this, what the forward took and the gradient of each output that has one,
            by its index; adds the parameters' gradients to the engine's.
        passage: what `again` returned, None unless it was kept.
    """

    training: Training
    record: FoldedPass
    step: int
    surroundings: Surroundings
    again: Callable[["FoldedCall", Sequence[torch.Tensor]], Passage]
    backward: Callable[["FoldedCall", Sequence[torch.Tensor], dict[int, torch.Tensor]], None]
    passage: Passage | None = None
    _node: Callable[[], Any] = lambda: None
    _spent: set[int] = dataclasses.field(default_factory=set)
    _left: tuple[Sequence[torch.Tensor], list[int]] | None = None

    def leave(self, saved: Sequence[torch.Tensor], given: Collection[int]) -> None:
        """Notes which outputs have had their gradient, and keeps `saved` for the others.

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
        """What `leave` kept; None where it didn't, or one of these outputs had its gradient.

        Raises:
            SpmdZeroUsageError: it was written since.
        """
        if self._left is None or not self._spent.isdisjoint(given):
            return None
        saved, versions = self._left
        if versions != [tensor._version for tensor in saved]:
            raise SpmdZeroUsageError(_WRITTEN)
        return saved

    def forget(self) -> None:
        """Lets go of what `leave` kept, which would be an output of the program that starts."""
        self._left = None

    def keep(self) -> None:
        """Traces what the backward needs, to be computed and kept by the program that is pending.

        Does nothing where the engine's step ended or the forward's tensors were written meanwhile,
        which the backward refuses.

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
        """The outputs; writes the parameters and buffers that the forward writes.

        Args:
            tensors: parameters, buffers and inputs.
            keys: of its random draws.
        """
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        outputs: Any = _Folded.apply(self, tensors, keys, *trained)
        _waiting.add(self)
        return outputs


# Forwards of all engines: those whose backward is still to come, and those of which only some
# outputs have had theirs.
_waiting: "weakref.WeakSet[FoldedCall]" = weakref.WeakSet()
_leaving: "weakref.WeakSet[FoldedCall]" = weakref.WeakSet()


def keep_waiting(*, ending: Training | None) -> None:
    """Has the program that is about to start compute what later backwards need of its forwards.

    Args:
        ending: whose step ends with this program, and whose forwards are spent.
    """
    for call in [*_waiting]:
        if call.training is not ending:
            call.keep()
    while _leaving:
        _leaving.pop().forget()


class _Folded(torch.autograd.Function):
    # Autograd sees the trained tensors, to come here whichever of them is asked for; the others are
    # in a list, unseen by it.
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
        count, written = len(record.markers), len(record.written)
        outputs, rest = values[:count], values[count:]
        if record.written:
            # The backward pass takes them as the forward found them.
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
