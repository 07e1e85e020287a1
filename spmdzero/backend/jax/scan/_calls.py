"""Watches calls of blocks while a forward is traced."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from spmdzero._logging import log_once
from spmdzero.backend._current import current, runtime
from spmdzero.backend.jax.lazy._pending_block import made_real
from spmdzero.backend.jax.scan._body import Block, Body
from spmdzero.backend.jax.scan._chain import Call, Chain
from spmdzero.backend.jax.scan._parts import Form
from spmdzero.backend.jax.scan._trace import trace
from spmdzero.backend.replica import _keepers
from spmdzero.backend.replica._anchors import is_hooked
from spmdzero.backend.replica._around import Provided
from spmdzero.backend.replica._candidates import (
    Candidate,
    NotALoopError,
    candidates,
    has_hooks,
    taken_apart,
)
from spmdzero.backend.replica._class_calls import calls_replaced
from spmdzero.backend.replica._recompute import recomputed
from spmdzero.backend.replica._torchs_policy import KeepsByPolicy

Scan = Literal["auto", "on", "off"]


@contextlib.contextmanager
def equal_blocks_as_loops(
    model: nn.Module,
    scan: Scan,
    provided: Provided,
) -> Iterator[None]:
    """Context in which equal blocks of `model` that follow each other become one loop.

    Args:
        model: a module with the replica's parameters.
        scan: "auto" makes loops only in programs for TPUs.
        provided: the inputs of the forward.
    """
    if scan == "off" or (scan == "auto" and runtime.program_platform() != "TPU"):
        yield
        return
    found = candidates(model)
    if not found and scan == "on":
        log_once(
            '"spmd": {"scan": "on"} makes no loop: no four equal blocks follow each other in a '
            "ModuleList or Sequential of the model"
        )
    classes = {type(part) for part in model.modules() if id(part) in found}
    calls = _Calls(found, provided)
    with contextlib.ExitStack() as stack:
        stack.callback(calls.let_go)
        for kind in classes:
            stack.enter_context(calls_replaced(kind, calls.watched))
        yield


class _Calls:
    def __init__(self, found: dict[int, Candidate], provided: Provided) -> None:
        self._found, self._provided = found, provided
        self._chain: Chain | None = None
        self._series = 0
        self._unrolled: set[int] = set()
        self._tracing = False

    def watched(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Answers a call of a module whose class is that of a block."""
        candidate = self._found.get(id(module))
        if candidate is None or self._tracing or candidate.series in self._unrolled:
            return call(module, *args, **kwargs)
        return self._call(candidate, call, module, args, kwargs)

    def let_go(self) -> None:
        """Drops the latest chain, which holds tensors."""
        self._chain = None

    def _call(
        self,
        candidate: Candidate,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not args or not isinstance(args[0], torch.Tensor):
            _say(candidate, "the first argument of one is no tensor")
            return call(module, *args, **kwargs)
        x, *rest = args
        chain = self._before(candidate)
        expected = chain is not None and chain.expects(x)
        rest, kwargs = made_real((tuple(rest), kwargs))
        # The other arguments may be computed from what the chain's blocks return.
        follows = expected and chain is not None and not chain.is_real
        keeper = _keepers.innermost_of(KeepsByPolicy)
        try:
            body, shared = self._trace(
                candidate, call if keeper is None else functools.partial(keeper.in_body, call),
                module, x, rest, kwargs, saves=keeper is not None or not is_hooked(),
            )  # fmt: skip
        except NotALoopError as reason:
            self._leave(candidate, str(reason))
            x = made_real(x)
            return call(module, x, *rest, **kwargs)
        if chain is not None:
            why = _break(chain, body, shared) if follows else _CHANGED
            if why is not None:
                _say(candidate, why)
                chain = None
        if chain is None:
            x = made_real(x)
            kept = functools.partial(_say, candidate, _KEPT)
            chain = self._chain = Chain(
                body, x, shared, self._provided, last=candidate.place - 1, kept=kept
            )
            self._series = candidate.series
        chain.last = candidate.place
        made = chain.add(
            Call(
                module=module,
                call=call,
                args=rest,
                kwargs=kwargs,
                keys=chain.draw(),
                run=_alone(keeper),
            )
        )
        return made_real(made) if self._is_last(candidate) else made

    def _before(self, candidate: Candidate) -> Chain | None:
        """The chain of the block before `candidate`, if that was the latest to be called."""
        chain = self._chain
        if chain is None or self._series != candidate.series:
            return None
        return chain if candidate.place == chain.last + 1 else None

    def _trace(
        self,
        candidate: Candidate,
        call: Callable[..., Any],
        module: nn.Module,
        x: torch.Tensor,
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        saves: bool,
    ) -> tuple[Body, list[torch.Tensor]]:
        if has_hooks(module):
            raise NotALoopError("a block has hooks")
        _, shared = taken_apart((rest, kwargs))
        if any(t.device.type != current().device_type for t in (x, *shared)):
            raise NotALoopError("a block is given a tensor on the CPU")
        if not x.is_floating_point():
            raise NotALoopError(f"a block is given {x.dtype}")
        block = Block(
            module=module,
            name=f"{candidate.name}.*".removeprefix("."),
            call=call,
            args=rest,
            kwargs=kwargs,
            x=Form(tuple(x.shape), x.dtype),
            saves=saves,
        )
        self._tracing = True
        try:
            return trace(block, self._provided.gathered), shared
        finally:
            self._tracing = False

    def _is_last(self, candidate: Candidate) -> bool:
        return not any(
            other.series == candidate.series and other.place == candidate.place + 1
            for other in self._found.values()
        )

    def _leave(self, candidate: Candidate, reason: str) -> None:
        """Makes the rest of the row run block by block."""
        self._unrolled.add(candidate.series)
        _say(candidate, reason)


def _alone(keeper: KeepsByPolicy | None) -> Callable[..., Any]:
    """Runs a block that is called now, if it becomes no part of a loop."""
    if keeper is not None:
        return keeper.again
    return recomputed if is_hooked() else _call


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_CHANGED = "something is done between two of them: with what one returns, or with random numbers"
_KEPT = "what a block in the middle returns is kept, as output_hidden_states has it"


def _break(chain: Chain, body: Body, shared: list[torch.Tensor]) -> str | None:
    """Why a block that takes what the chain's latest returned is no part of it, None if it is."""
    if len(shared) != len(chain.shared) or any(
        one is not other for one, other in zip(shared, chain.shared, strict=True)
    ):
        return "one of them is given another tensor than the one before, beside what that returned"
    if not body.is_same(chain.body):
        return "one of them computes otherwise than the one before"
    return None


def _say(candidate: Candidate, reason: str) -> None:
    log_once(
        f"the equal blocks of {candidate.name!r} are not compiled as one loop "
        f'("spmd": {{"scan"}}): {reason}'
    )
