"""torch's reentrant checkpoint, which runs a part of the forward again in its own backward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.utils.checkpoint import CheckpointFunction


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
