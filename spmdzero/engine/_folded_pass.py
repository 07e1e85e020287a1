"""A module's forward and its backward as two operations."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from spmdzero.backend import Passage, Region, arrays, compiler, map_tensors
from spmdzero.engine._folded_surroundings import Surroundings
from spmdzero.engine._generator_watch import GeneratorWatch
from spmdzero.engine._input_form import UnknownInputError, freeze
from spmdzero.engine._kinds import NotCapturableError
from spmdzero.engine._module_tracer import (
    KeySource,
    ModuleTracer,
    TracedFunction,
    attempt,
    fold_python,
    meta,
    refuse_read,
)
from spmdzero.engine._module_watch import ModuleWatch
from spmdzero.step._gradient_path import GradientPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedPass:
    """The forward of one kind of input.

    Attributes:
        traced: parameters, buffers, inputs and keys -> outputs, what the forward wrote, flags.
        output: what the module returned, a meta tensor in the place of each tensor.
        markers: the meta tensors, in the order of the outputs.
        differentiable: whether each output carries a gradient.
        written, flags: names of parameters and buffers, and of flags, that the forward writes.
    """

    traced: TracedFunction
    output: Any
    markers: tuple[torch.Tensor, ...]
    differentiable: tuple[bool, ...]
    written: tuple[str, ...]
    flags: tuple[str, ...]

    def difference(self, other: "FoldedPass") -> str | None:
        """Why `other` is another forward than this one, None if it is the same."""
        return self.traced.difference(other.traced)


class PassTracer(ModuleTracer):
    """Traces the forward of the three calls, in the replica region, and its backward."""

    @property
    def _region(self) -> Region:
        assert isinstance(self.forward, Region)
        return self.forward

    def fold(self, tensors: Sequence[torch.Tensor]) -> FoldedPass:
        """Folds the forward; draws nothing from a generator.

        Args:
            tensors: `state` and the inputs.

        Raises:
            NotCapturableError: it can't be one operation.
        """
        passages: list[Passage] = []
        outputs: list[Any] = []
        markers: list[torch.Tensor] = []
        flat: list[torch.Tensor] = []

        def mark(_: str, tensor: torch.Tensor) -> torch.Tensor:
            if not arrays.is_mine(tensor):
                raise NotCapturableError(
                    "the forward returns a tensor on the CPU, which may be another at each call"
                )
            flat.append(tensor)
            markers.append(meta())
            return markers[-1]

        def function(tensors: list[torch.Tensor], key: KeySource) -> list[torch.Tensor]:
            passage = self.passage(tensors, key=key, sink=_ignore)
            outputs.append(map_tensors(passage.output, mark))
            if not flat:
                raise NotCapturableError("the forward returns no tensor")
            passages.append(passage)
            return [*flat, *passage.written.values(), *passage.flags.values()]

        traced = fold_python(function, tensors, known=self.known(self.state))
        (passage,), (output,) = passages, outputs
        if traced.draws != tuple(range(len(traced.draws))) or self._region.recomputes:
            raise NotCapturableError("activation checkpointing runs the forward again in backward")
        try:
            form = freeze(output)[0]
        except UnknownInputError as error:
            raise NotCapturableError(str(error).replace("an input is", "an output is")) from error
        differentiable = tuple(tensor.requires_grad for tensor in flat)
        written, flags = tuple(passage.written), tuple(passage.flags)
        return FoldedPass(
            traced=traced.labelled(form, differentiable, written, flags),
            output=output,
            markers=tuple(markers),
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
        around: Surroundings,
    ) -> Passage:
        """Traces the forward once more, for its backward: gradients of the parameters go to `sink`.

        The compiler finds the forward's operations twice in the program, and keeps one of each.

        Args:
            tensors, keys: what the forward took.
            sink: takes a parameter's name and its gradient.
            around: what the forward saw.
        """
        left = iter(keys)
        # What the forward drew was drawn when it ran first; what the backward draws comes on top.
        state = torch.get_rng_state()
        try:
            # It is recorded only to have fixed values read as in the forward.
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
        around: Surroundings,
        path: GradientPath,
    ) -> TracedFunction | NotCapturableError:
        """Folds a backward, or says why it can't be; draws and changes nothing.

        Its labels are the parameters whose gradients it returns.

        Args:
            record: the forward.
            inputs: what that took, its keys, and the gradients.
            differentiated: the outputs that these are of.
            around: what the forward saw.
            path: on which gradients go.
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
            generators.places_of([])
            return TracedFunction(function=folded, labels=tuple(names))

        generators, watch = GeneratorWatch(), ModuleWatch(around.module, {})
        try:
            return attempt(fold_it, watch=watch, name="backward")
        finally:
            generators.restore()

    def backward(self, passage: Passage, grads: Mapping[int, torch.Tensor], *, folds: bool) -> None:
        """The backward pass of what `again` returned.

        Args:
            passage: traced.
            grads: of the loss, for each output that has one.
            folds: the tensors are stand-ins.

        Raises:
            NotCapturableError: `folds`, and it can't be one operation.
        """
        outputs: list[torch.Tensor] = []
        map_tensors(passage.output, lambda _, tensor: outputs.append(tensor))
        refusing: Any = {"key": _refuse_draw, "read": refuse_read} if folds else {}
        with self._region.backward(passage.state, **refusing):
            arrays.backward([outputs[index] for index in grads], list(grads.values()))
        if folds:
            self.refuse_reads()


def _ignore(name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
    pass


def _refuse_draw(_: int) -> NoReturn:
    raise NotCapturableError("what runs in backward draws random numbers")
