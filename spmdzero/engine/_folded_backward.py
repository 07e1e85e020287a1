"""The backward pass of a folded forward as one operation, gradients reduced."""

import dataclasses
from collections.abc import Sequence

import torch

from spmdzero.backend.torch_xla import FoldedFunction, fold
from spmdzero.engine._capture_random import GeneratorWatch
from spmdzero.engine._capture_watch import ModuleWatch
from spmdzero.engine._folded_attempt import attempt
from spmdzero.engine._folded_call import FoldedCall
from spmdzero.engine._folded_pass import PassTracer, changed_number
from spmdzero.engine._record import NotCapturableError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedBackward:
    """A folded backward pass.

    Attributes:
        function: takes what the forward took and the gradients of its outputs.
        names: the parameters whose gradients it returns.
    """

    function: FoldedFunction
    names: tuple[str, ...]

    def difference(self, other: "FoldedBackward") -> str | None:
        """Why `other` is another pass than this one, None if it is the same."""
        if self.names != other.names or self.function.proto != other.function.proto:
            return "the same inputs gave another graph in backward"
        return changed_number(self.function, other.function)


def fold_backward(
    tracer: PassTracer,
    call: FoldedCall,
    inputs: Sequence[torch.Tensor],
    differentiated: tuple[int, ...],
) -> FoldedBackward | NotCapturableError:
    """Folds the backward of `call`, or says why it can't be; draws and changes nothing.

    Args:
        tracer: of the forward.
        call: whose backward.
        inputs: what the forward took, its keys, and the gradients.
        differentiated: the outputs that these are of.
    """
    store, keys = call.training.gradients, call.record.keys
    names: list[str] = []

    def function(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        end = len(tensors) - len(differentiated)
        found: list[torch.Tensor] = []

        def sink(name: str, grad: torch.Tensor) -> None:
            if store.is_trained(name):
                names.append(name)
                found.append(store.reduced(name, grad))

        given = dict(zip(differentiated, tensors[end:], strict=True))
        passage = tracer.again(
            tensors[: end - keys], tensors[end - keys : end], sink, around=call.surroundings
        )
        tracer.backward(passage, given, folds=True)
        if not found:
            raise NotCapturableError("no parameter has a gradient")
        return found

    def fold_it() -> FoldedBackward:
        folded = fold(function, inputs).sharing(call.record.function.constants)
        generators.places_of([])
        return FoldedBackward(function=folded, names=tuple(names))

    generators, watch = GeneratorWatch(), ModuleWatch(call.training.module, {})
    try:
        return attempt(fold_it, watch=watch, name="backward")
    finally:
        generators.restore()
