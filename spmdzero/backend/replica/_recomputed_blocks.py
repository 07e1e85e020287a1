"""The modules of a model that run again in the backward pass, and their policies."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero._names import did_you_mean
from spmdzero._user_line import user_line
from spmdzero.backend._current import current
from spmdzero.backend.protocols._region import Recompute
from spmdzero.backend.replica._anchors import is_hooked
from spmdzero.backend.replica._candidates import NotALoopError, candidates, taken_apart
from spmdzero.backend.replica._class_calls import calls_replaced
from spmdzero.backend.replica._recompute import (
    is_loop_body,
    recomputed,
    recomputed_but_dots,
    recomputed_from_host,
)
from spmdzero.errors import ReplicaRegionError, SpmdZeroConfigError

_WAYS: dict[str, Callable[..., Any]] = {
    "everything": recomputed,
    "dots": recomputed_but_dots,
    "offload": recomputed_from_host,
}
_KEY = "spmd.recompute"


class RecomputedBlocks:
    """The modules that run again in the backward pass.

    Args:
        model: the model that is trained.
        recompute: the policy that says which operations of each block are computed again: one for
            equal blocks that follow each other in a ModuleList or Sequential, or one per pattern of
            module names.

    Raises:
        SpmdZeroConfigError: there are no such blocks, a pattern matches none, or blocks are nested.
    """

    def __init__(self, model: nn.Module, recompute: Recompute) -> None:
        self._model = model
        if isinstance(recompute, str):
            names = _equal_blocks(model) if recompute != "nothing" else []
            if not names and recompute != "nothing":
                raise _refusal(
                    recompute,
                    f"{type(model).__name__} has no two equal blocks that follow each other in a "
                    "ModuleList or Sequential",
                    fix=f'Name modules: {{"encoder.*": "{recompute}"}}.',
                )
            found = dict.fromkeys(names, recompute)
        else:
            found = _matched(model, recompute)
        if "offload" in found.values() and current().host_memory is None:
            raise _refusal(
                recompute,
                f"the {current().name} backend keeps what a program computes on the devices",
                fix='Write "everything", which keeps the same there; the JAX backend keeps it on '
                "the host.",
            )
        modules = dict(model.named_modules())
        self._policies = {id(modules[name]): policy for name, policy in found.items()}
        self._kinds = {type(modules[n]) for n, policy in found.items() if policy != "nothing"}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which calls of these modules keep only the values that their policy names."""
        with contextlib.ExitStack() as stack:
            for kind in self._kinds:
                stack.enter_context(calls_replaced(kind, self._watched))
            yield

    def _watched(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        policy = self._policies.get(id(module), "nothing")
        if policy == "nothing" or not torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        if policy == "dots" and is_loop_body():
            # A loop keeps its products anyway, and computes the rest again.
            return call(module, *args, **kwargs)
        self._refuse_what_runs_once(module, args, kwargs)
        return _WAYS[policy](call, module, *args, **kwargs)

    def _refuse_what_runs_once(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_hooked() or getattr(module, "gradient_checkpointing", False):
            raise self._error(
                "the model checkpoints activations itself, around or in this block. Turn one of "
                "the two off: model.gradient_checkpointing_disable(), or leave the key out"
            )
        try:
            taken_apart((args, kwargs))
        except NotALoopError as reason:
            raise self._error(
                f"{reason}, and it is to run twice. For a cache of keys and values, set "
                "model.config.use_cache = False"
            ) from None

    def _error(self, message: str) -> ReplicaRegionError:
        return ReplicaRegionError(f'{user_line(self._model)}: "spmd": {{"recompute"}}: {message}')


def _equal_blocks(model: nn.Module) -> list[str]:
    equal = candidates(model, fewest=2)
    names = [name for name, module in model.named_modules() if id(module) in equal]
    return [name for name in names if _outer(name, names) is None]


def _matched(model: nn.Module, recompute: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, str] = {}
    for pattern, policy in recompute.items():
        # A star matches no dot, so that "h.*" doesn't match the modules inside the blocks.
        form = re.compile(re.escape(pattern).replace(r"\*", "[^.]*"))
        matches = [name for name in names if form.fullmatch(name)]
        if not matches:
            raise _refusal(
                dict(recompute),
                f"no module's name is {pattern!r}, where * is anything but a dot",
                fix=did_you_mean(pattern, names) or f"There is for example {names[-1]!r}."
                if names
                else "The model has no modules.",
            )
        for name in matches:
            found.setdefault(name, policy)
    for name in found:
        outer = _outer(name, found)
        if outer is not None:
            raise _refusal(
                dict(recompute),
                f"{name!r} is in {outer!r}, and both match: it would run three times",
                fix="Match one of the two.",
            )
    return found


def _outer(name: str, names: Any) -> str | None:
    return next((other for other in names if name.startswith(f"{other}.")), None)


def _refusal(value: object, reason: str, *, fix: str) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(key=_KEY, value=value, reason=reason, fix=fix)
