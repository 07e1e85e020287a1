"""The modules of a model that run again in the backward pass, and their policies."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmdzero._names import did_you_mean
from spmdzero._user_line import user_line
from spmdzero.backend._current import current
from spmdzero.backend.protocols._region import Policy, Recompute, is_policy
from spmdzero.backend.replica._anchors import is_hooked
from spmdzero.backend.replica._candidates import NotALoopError, candidates, taken_apart
from spmdzero.backend.replica._class_calls import calls_replaced
from spmdzero.backend.replica._kept_by_name import (
    CONTEXT,
    INPUT,
    KeptByName,
    Places,
    TwiceNamedError,
    UnknownNameError,
    places_in,
)
from spmdzero.backend.replica._recompute import (
    KeepsProducts,
    can_rest_on_host,
    loop_body,
    puts_inputs_on_host,
    recomputed_but,
)
from spmdzero.errors import ReplicaRegionError, SpmdZeroConfigError

# Words for policies by name.
_WORDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "everything": {},
    "offload": {"offload": [INPUT]},
}
_KEY = "spmd.recompute"


class RecomputedBlocks:
    """The modules that run again in the backward pass.

    Args:
        model: the model that is trained.
        recompute: the policy that says which operations of each block are computed again: one for
            equal blocks that follow each other in a ModuleList or Sequential, or one per pattern of
            module names. A policy is a word, or the names of what is kept and offloaded.

    Raises:
        SpmdZeroConfigError: there are no such blocks, a pattern matches none, blocks are nested, or
            a name is of nothing in a block.
    """

    def __init__(self, model: nn.Module, recompute: Recompute) -> None:
        self._model = model
        if is_policy(recompute):
            names = equal_blocks(model) if recompute != "nothing" else []
            if not names and recompute != "nothing":
                raise _refusal(
                    recompute,
                    f"{type(model).__name__} has no two equal blocks that follow each other in a "
                    "ModuleList or Sequential",
                    fix=f'Name modules: {{"encoder.*": {json.dumps(recompute)}}}.',
                )
            found: dict[str, Policy] = dict.fromkeys(names, recompute)
        else:
            found = _matched(model, recompute)
        modules = dict(model.named_modules())
        self._policies: dict[int, str | Places] = {
            id(modules[name]): policy
            if isinstance(policy, str) and policy not in _WORDS
            else _places(modules[name], name, policy, recompute)
            for name, policy in found.items()
        }
        places = [policy for policy in self._policies.values() if isinstance(policy, Places)]
        if any(each.on_host for each in places) and current().host_memory is None:
            raise _refusal(
                recompute,
                f"the {current().name} backend keeps what a program computes on the devices",
                fix='Write "everything", or "keep" in the place of "offload", which keep the same '
                "there; the JAX backend keeps it on the host.",
            )
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
        anchors = loop_body()
        if anchors is not None and policy == "dots":
            # A loop keeps its products anyway, and computes the rest again.
            return call(module, *args, **kwargs)
        self._refuse_what_runs_once(module, args, kwargs)
        if isinstance(policy, str):
            return recomputed_but(KeepsProducts(), call, (module, *args), kwargs)
        inputs = policy.input or puts_inputs_on_host()
        can_move = (policy.on_host or inputs) and can_rest_on_host()
        keeper = KeptByName(policy, can_move=can_move, anchors=anchors)
        if anchors is None:
            given = (module, *args)
            made = recomputed_but(keeper, call, given, kwargs, on_host=inputs and can_move)
        else:
            # A loop computes again what isn't an anchor, so that the block needn't run again.
            anchors.input_on_host = inputs and can_move
            with keeper:
                made = call(module, *args, **kwargs)
        self._refuse_what_was_not_met(keeper, policy, module)
        return made

    def _refuse_what_was_not_met(
        self, keeper: KeptByName, places: Places, module: nn.Module
    ) -> None:
        for pattern, named in places.named.items():
            if named & keeper.met:
                continue
            if pattern == CONTEXT:
                raise self._error(
                    f'"{CONTEXT}" is what torch\'s scaled_dot_product_attention returns, which a '
                    f"{type(module).__name__} doesn't call. Name the module that attends, or set "
                    'attn_implementation="sdpa" in transformers'
                )
            raise self._error(
                f"{pattern!r} in a {type(module).__name__} is not called, or returns no "
                "floating-point tensor, so there is nothing to keep. Name a module whose output is "
                "used"
            )

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


def _places(block: nn.Module, name: str, policy: Policy, written: Recompute) -> Places:
    try:
        return places_in(block, **(_WORDS[policy] if isinstance(policy, str) else policy))
    except UnknownNameError as error:
        there = [*error.names, INPUT, CONTEXT]
        tails = dict.fromkeys(name.rpartition(".")[2] for name in error.names)
        raise _refusal(
            written,
            f"no module in {name!r} has the name {error.pattern!r}, where * is anything but a dot",
            fix=did_you_mean(error.pattern, [*there, *tails])
            or f"There are {', '.join(map(repr, there))}.",
        ) from None
    except TwiceNamedError as error:
        raise _refusal(
            written, f"{str(error)!r} in {name!r} is to be kept and offloaded", fix="Name it once."
        ) from None


def equal_blocks(model: nn.Module) -> list[str]:
    """Names of the blocks that follow equal ones, but those inside of others."""
    equal = candidates(model, fewest=2)
    names = [name for name, module in model.named_modules() if id(module) in equal]
    return [name for name in names if _outer(name, names) is None]


def _matched(model: nn.Module, recompute: Mapping[str, Policy]) -> dict[str, Policy]:
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, Policy] = {}
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
