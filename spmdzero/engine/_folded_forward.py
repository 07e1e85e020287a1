"""A folded forward and its backward: two operations, and one node of autograd."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from spmdzero.backend import (
    Passage,
    Skeleton,
    UnknownContentError,
    arrays,
    compiler,
    current,
    found,
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
from spmdzero.state._training import Training
from spmdzero.step._gradient_path import GradientPath

# A seed that no script is likely to have.
_AGAIN = 0x5E6D_0A6A_1D0C_5EED


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


class DrawnKeys:
    """Hands out the keys of a forward that runs once more, and of what checkpointing runs again.

    Args:
        keys: those that the forward drew when it ran first.
        new: gives the key of a value that the forward didn't draw.
    """

    def __init__(self, keys: Sequence[torch.Tensor], new: KeySource) -> None:
        self._left, self._new = iter(keys), new
        self._of: dict[int, torch.Tensor] = {}

    def take(self, value: int) -> torch.Tensor:
        """The next key of the forward, whose generator now gives `value`."""
        self._of[value] = next(self._left)
        return self._of[value]

    def again(self, value: int) -> torch.Tensor:
        """The key of the forward's draw of `value`, which a recomputed block repeats."""
        return self._of[value] if value in self._of else self._new(value)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """A traced forward, and what its backward may draw again.

    Attributes:
        passage: the results of the forward.
        drawn: the keys of a forward in the replica region.
        seed: that of a global forward's draws, None where it makes none.
        draws: number of these draws.
    """

    passage: Passage
    drawn: DrawnKeys
    seed: torch.Tensor | None
    draws: int


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

    @functools.cached_property
    def flowing(self) -> frozenset[int]:
        """The indices of the outputs that carry a gradient."""
        return frozenset(i for i, flows in enumerate(self.differentiable) if flows)

    def difference(self, other: "FoldedPass") -> str | None:
        """How `other` differs from this forward, or None if they are the same."""
        return self.traced.difference(other.traced)

    def settled(
        self, training: Training, tensors: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The outputs for these tensors and keys; what the forward writes is written."""
        values = self.traced.function([*tensors, *keys])
        count, written = len(self.differentiable), len(self.written)
        rest = values[count:]
        training.forward.settle(
            written=dict(zip(self.written, rest[:written], strict=True)),
            flags=dict(zip(self.flags, rest[written:], strict=True)),
        )
        return values[:count]


class PassTracer(ModuleTracer):
    """Traces a forward and its backward."""

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

        seeded = self._training.region is None
        traced = fold_forward(function, tensors, known=self.known(self.state), seeded=seeded)
        ((passage, output, flat),) = made
        if traced.draws != tuple(range(len(traced.draws))):
            raise NotCapturableError("the forward draws a random number twice")
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
        new: KeySource,
    ) -> Forward:
        """Traces the forward once more for its backward, which hands the gradients to `sink`.

        The program has the forward's operations twice, and the compiler keeps one of each.

        Args:
            tensors, keys: the forward's arguments.
            sink: takes a parameter's name and its gradient.
            around: the forward's context.
            new: gives the key of a draw that only the backward makes.
        """
        drawn, seed = DrawnKeys(keys, new), None
        if self._training.region is None and keys:
            (seed,) = keys
        # The forward's draws were made when it ran first, and must not move the generator again.
        # Values of another seed are told from those that the backward draws for itself.
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(_AGAIN)
        try:
            # Uploads are recorded only so that fixed values are read as in the forward.
            recorded = compiler.record_uploads()
            with torch.enable_grad(), around.restored(), recorded, _drawing(seed) as draws:
                given = [tensor.detach() for tensor in tensors]
                passage = self.passage(given, key=drawn.take, sink=sink)
        finally:
            torch.set_rng_state(state)
        count = draws.count if draws else 0
        return Forward(passage=passage, drawn=drawn, seed=seed, draws=count)

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
        arriving = path.of_batch if self._training.region is None else path.of_replica

        def function(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            end = len(tensors) - len(differentiated)
            keys, found = end - record.traced.keys, list[torch.Tensor]()

            def sink(name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
                if path.is_trained(name):
                    names.append(name)
                    found.append(grad if waits else arriving(name, grad))

            forward = self.again(
                tensors[:keys], tensors[keys:end], sink, around=around, new=_refuse_draw
            )
            given = dict(zip(differentiated, tensors[end:], strict=True))
            self.backward(forward, given, folds=True)
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

    def backward(self, forward: Forward, grads: Mapping[int, torch.Tensor], *, folds: bool) -> None:
        """Runs the backward pass of the forward that `again` returned.

        Args:
            forward: a traced forward.
            grads: index of an output -> its gradient of the loss.
            folds: whether the tensors are stand-ins.

        Raises:
            NotCapturableError: with `folds`, if the pass can't be one operation.
        """
        passage, read = forward.passage, refuse_read if folds else None
        outputs = found(passage.output, torch.Tensor)
        seeded = _drawing(forward.seed, first=forward.draws)
        again = self.forward.backward(passage.state, key=forward.drawn.again, read=read)
        # What checkpointing runs again draws as the forward did, what only backward draws after it.
        with seeded, again:
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


def _drawing(
    seed: torch.Tensor | None, *, first: int = 0
) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if seed is None else compiler.drawing(seed, first=first)


def _ignore(name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
    pass


def _refuse_draw(_: int) -> NoReturn:
    raise NotCapturableError("what runs in backward draws random numbers")
