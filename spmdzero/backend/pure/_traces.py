"""Folds functions that run the user's Python."""

import random
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch

from spmdzero.backend._current import arrays, compiler, current
from spmdzero.backend._keys import draw_keys
from spmdzero.backend._named_states import NamedStates
from spmdzero.backend.protocols._compiler import FoldedFunction, StandInKeptError
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.pure._module_watch import ModuleWatch
from spmdzero.errors import SpmdZeroError


class GeneratorWatch:
    """The state of the CPU's generators when a trace began, to which they return when it ends."""

    def __init__(self) -> None:
        self._others = _others()
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
        self._state, self._named = torch.get_rng_state(), NamedStates.now()

    def __enter__(self) -> "GeneratorWatch":
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._state)
        self._named.put_back()
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def places_of(self, keys: Collection[int], *, who: str) -> list[int]:
        """The index of each draw's key among the keys that `draw_keys` would draw.

        Checkpointing draws some keys again, from a generator that it has set back.

        Args:
            keys: all that the trace drew, in their order.
            who: what was traced, in reasons.

        Raises:
            ImpureError: the trace drew other numbers too.
        """
        if _others() != self._others:
            raise ImpureError(f"{who} draws from Python's or numpy's random numbers")
        if self._named.were_drawn_from():
            raise ImpureError(f"{who} draws from a named random state")
        after = torch.get_rng_state()
        torch.set_rng_state(self._state)
        drawn: list[int] = []
        for key in keys:
            if key not in drawn:
                drawn += (int(new) for new in draw_keys(1))
        same = torch.equal(after, torch.get_rng_state())
        torch.set_rng_state(after)
        if not same or not {*keys} <= {*drawn}:
            raise ImpureError(
                f"{who} draws from torch's CPU generator in Python, by which it may choose its way"
            )
        return [drawn.index(key) for key in keys]


def _others() -> tuple[object, ...]:
    numbers = np.random.get_state(legacy=False)
    return random.getstate(), repr(numbers), numbers["state"]["key"].tobytes()


class ImpureError(Exception):
    """A run of the user's Python can't stand for later ones; the text is a clause that says why."""


Traced = TypeVar("Traced")


def fold_python(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    *,
    who: str,
    more: Sequence[torch.Tensor] = (),
    drawn: Collection[int] = (),
    known: Collection[int] = (),
) -> tuple[FoldedFunction, list[int]]:
    """Folds `function`, which runs the user's Python; leaves the generators as they were.

    Args:
        function: see `Compiler.fold`.
        tensors: its inputs.
        who: what runs, such as ``"the forward"``, in reasons.
        more: see `Compiler.fold`.
        drawn: the keys of random draws, to which the function adds while it runs.
        known: handles of buffers that it may read beside its inputs.

    Returns the folded function, and the index of each drawn key among those of `draw_keys`.

    Raises:
        ImpureError: it read or drew a value that may differ the next time.
    """
    with GeneratorWatch() as generators:
        with compiler.record_uploads() as uploads:
            folded = compiler.fold(function, tensors, more=more)
        places = generators.places_of(drawn, who=who)
    for found in compiler.unknown_values(folded.constants, uploads, known=known):
        raise ImpureError(
            f"{who} uses a tensor {list(found.shape)} that is neither an input nor part of "
            "the module: register it as a buffer"
        )
    return folded, places


def attempt(trace: Callable[[], Traced], *, watch: ModuleWatch, who: str) -> Traced | ImpureError:
    """The result of `trace`, or why it can't stand for later runs.

    Args:
        trace: folds something.
        watch: the module's present state, which is restored.
        who: what is folded, such as ``"the forward"``, in reasons.
    """
    outcome = _try(trace, who)
    if change := watch.change():
        watch.restore()
        return ImpureError(f"{who} changes the module: {change}")
    return outcome


def _try(trace: Callable[[], Traced], who: str) -> Traced | ImpureError:
    try:
        with compiler.no_stand_in_left():
            return trace()
    except StandInKeptError:
        return ImpureError(f"{who} keeps a tensor outside of the module")
    except (ImpureError, SpmdZeroError, RuntimeError) as error:
        # The error isn't kept: its frames hold traced tensors. A real error is raised again by the
        # plain run.
        return ImpureError(str(error))


def same_constants(mine: Sequence[torch.Tensor], its: Sequence[torch.Tensor]) -> bool:
    """Whether two folded functions of one program read the same values beside their inputs."""
    return all(compiler.same_value(one, other) for one, other in zip(mine, its, strict=True))


Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Folds:
    """Calls functions, folded if that is wanted.

    Attributes:
        wanted: whether the next calls are folded.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._folded: dict[Hashable, FoldedFunction] = {}

    @classmethod
    def of_few(cls, mesh: Mesh) -> "Folds":
        """Folds functions of few operations of a loss.

        It pays only where Python records operations, and needs a loss that all hosts have.
        """
        folds = cls()
        folds.wanted = current().compiler is not None and mesh.across is None
        return folds

    def __call__(
        self, key: Hashable, function: Function, inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Calls `function(inputs)`, as one operation if that is wanted.

        Args:
            key: functions with the same key do the same with tensors of the same shapes and dtypes.
            function: see `spmdzero.backend.Compiler`.
            inputs: tensors, which may be pending.
        """
        if not self.wanted:
            return function(inputs)
        # Ask the backend: torch would ask a tensor's class for each of them.
        form = key, tuple(arrays.shapes_of(inputs))
        if form not in self._folded:
            with compiler.no_stand_in_left():
                self._folded[form] = compiler.fold(function, inputs)
        return self._folded[form](inputs)
