"""The backward pass of a folded forward as one operation, gradients reduced."""

from collections.abc import Sequence

import torch

from spmdzero.backend.torch_xla import fold
from spmdzero.engine._folded_attempt import attempt
from spmdzero.engine._folded_call import FoldedCall
from spmdzero.engine._folded_pass import PassTracer
from spmdzero.engine._generator_watch import GeneratorWatch
from spmdzero.engine._kinds import NotCapturableError
from spmdzero.engine._module_tracer import TracedFunction
from spmdzero.engine._module_watch import ModuleWatch


def fold_backward(
    tracer: PassTracer,
    call: FoldedCall,
    inputs: Sequence[torch.Tensor],
    differentiated: tuple[int, ...],
) -> TracedFunction | NotCapturableError:
    """Folds the backward of `call`, or says why it can't be; draws and changes nothing.

    Its labels are the parameters whose gradients it returns.

    Args:
        tracer: of the forward.
        call: whose backward.
        inputs: what the forward took, its keys, and the gradients.
        differentiated: the outputs that these are of.
    """
    path, keys = call.engine._gradients.path, call.record.traced.keys
    names: list[str] = []

    def function(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        end = len(tensors) - len(differentiated)
        found: list[torch.Tensor] = []

        def sink(name: str, grad: torch.Tensor) -> None:
            if path.is_trained(name):
                names.append(name)
                found.append(path.of_replica(name, grad))

        given = dict(zip(differentiated, tensors[end:], strict=True))
        passage = tracer.again(
            tensors[: end - keys], tensors[end - keys : end], sink, around=call.surroundings
        )
        tracer.backward(passage, given, folds=True)
        if not found:
            raise NotCapturableError("no parameter has a gradient")
        return found

    def fold_it() -> TracedFunction:
        folded = fold(function, inputs).sharing(call.record.traced.function.constants)
        generators.places_of([])
        return TracedFunction(function=folded, labels=tuple(names))

    generators, watch = GeneratorWatch(), ModuleWatch(call.engine.module, {})
    try:
        return attempt(fold_it, watch=watch, name="backward")
    finally:
        generators.restore()
