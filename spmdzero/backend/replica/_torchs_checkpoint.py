"""torch.utils.checkpoint in a forward: it saves memory, and runs again inside of the region."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.utils.checkpoint import CheckpointFunction

from spmdzero.backend.replica._recompute import UNTIED, loop_body, recomputed_but
from spmdzero.backend.replica._torchs_policy import kept_by_policy

# torch calls its function through this attribute, by whatever name a script has imported it
# (torch/_compile.py). Where another torch has no such attribute, the tests tell.
_CALLED = "__dynamo_disable"
# Of torch's function; a script's own keyword arguments are those of what it checkpoints.
_OPTIONS = {*inspect.signature(UNTIED).parameters, "preserve_rng_state"} - {
    *("function", "args", "kwargs", "use_reentrant")
}


@contextlib.contextmanager
def tied_checkpoints() -> Iterator[None]:
    """Context in which torch.utils.checkpoint recomputes as `recomputed` does.

    XLA merges what torch's own runs again with the forward, and no memory is saved.
    """
    with mock.patch.dict(vars(UNTIED), {_CALLED: _recomputed}):
        yield


def _recomputed(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """Does what torch.utils.checkpoint.checkpoint does, with the inputs tied as `recomputed` says.

    Raises what torch's function raises.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
    context_fn = options.get("context_fn")
    options["use_reentrant"] = use_reentrant
    if kwargs and use_reentrant is not False:
        return UNTIED(function, *args, **options, **kwargs)
    keeps = None
    if use_reentrant is False and context_fn is not None:
        keeps = kept_by_policy(context_fn)
    if keeps is not None:
        del options["context_fn"]
        if loop_body() is not None:
            # A loop computes again what isn't an anchor, so that the function needn't run again.
            with keeps:
                return function(*args, **kwargs)
    return recomputed_but(keeps, function, args, kwargs, options=options)


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
