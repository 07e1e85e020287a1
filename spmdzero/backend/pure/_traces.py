"""Folds functions that run the user's Python."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from spmdzero.backend._current import compiler
from spmdzero.backend.protocols._compiler import FoldedFunction, StandInKeptError
from spmdzero.backend.pure._generators import GeneratorWatch
from spmdzero.backend.pure._impure import ImpureError
from spmdzero.backend.pure._module_watch import ModuleWatch
from spmdzero.errors import SpmdZeroError

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
    if any(constant.is_seed for constant in folded.constants):
        raise ImpureError(f"{who} draws from the devices' own generator")
    for found in compiler.unknown_values(folded.constants, uploads, known=known):
        raise ImpureError(
            f"{who} uses a tensor {list(found.tensor.shape)} that is neither an input nor part of "
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


def same_constants(mine: Sequence[Any], its: Sequence[Any]) -> bool:
    """Whether two folded functions of one program read the same values beside their inputs."""
    return all(
        compiler.same_value(one.tensor, other.tensor) for one, other in zip(mine, its, strict=True)
    )
