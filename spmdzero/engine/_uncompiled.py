"""Keeps torch's compiler out of an engine's calls, which XLA compiles."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# Dynamo's hook in Python's interpreter; torch._dynamo itself would take seconds to import.
from torch._C._dynamo import eval_frame

from spmdzero._logging import log_once

_Owner = TypeVar("_Owner", bound=type)


def uncompiled(names: str) -> Callable[[_Owner], _Owner]:
    """Makes methods of the decorated class run without torch's compiler.

    It would trace spmdzero's own Python, with tensors that it knows nothing of, if a script
    compiles an engine or a function that calls one. Modules and functions that are compiled within
    the model run as they were written.

    Args:
        names: the methods' names, separated by spaces.
    """

    def decorate(owner: _Owner) -> _Owner:
        for name in names.split():
            setattr(owner, name, _without_compiler(getattr(owner, name)))
        return owner

    return decorate


def _without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        traced = eval_frame.set_eval_frame(None)
        if traced:
            log_once("torch.compile around the engine has no effect: XLA compiles every step")
        try:
            with _all_eager():
                return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(traced)

    # A function that Dynamo traces doesn't enter this one; the frame of a call isn't looked at.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = "an engine compiles by XLA"  # type: ignore[attr-defined]
    _skip(run)
    return run


def _skip(function: Callable[..., Any]) -> None:
    code = function.__code__  # type: ignore[attr-defined]
    actions = eval_frame._FrameAction
    once = eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    eval_frame.set_code_exec_strategy(code, once)


def _all_eager() -> contextlib.AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
