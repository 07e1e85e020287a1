"""torch.utils.checkpoint in a forward: it saves memory, and runs again inside of the region."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.utils.checkpoint import CheckpointFunction

from spmdzero.backend.replica._recompute import UNTIED, recomputed_by_torch

# torch calls its function through this attribute, by whatever name a script has imported it
# (torch/_compile.py). Where another torch has no such attribute, the tests tell.
_CALLED = "__dynamo_disable"


@contextlib.contextmanager
def tied_checkpoints() -> Iterator[None]:
    """Context in which torch.utils.checkpoint recomputes as `recomputed` does.

    XLA merges what torch's own runs again with the forward, and no memory is saved.
    """
    with mock.patch.dict(vars(UNTIED), {_CALLED: recomputed_by_torch}):
        yield


@contextlib.contextmanager
def second_runs(inside: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Context around a forward: reentrant checkpoints in it run again inside `inside()`.

    `engine.backward` enters the region itself, but a plain `loss.backward()` doesn't know it: a
    function that ran on a replica's tensors would run on the whole ones.
    """
    forward = CheckpointFunction.forward

    def watched(ctx: Any, function: Callable[..., Any], *given: Any) -> Any:
        ran = False

        def run(*inputs: Any) -> Any:
            nonlocal ran
            here, ran = inside() if ran else contextlib.nullcontext(), True
            with here:
                return function(*inputs)

        return forward(ctx, run, *given)

    with mock.patch.object(CheckpointFunction, "forward", staticmethod(watched)):
        yield
