"""Keeps by name what of a block stays for its backward, where all else is computed again."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from spmdzero.backend._current import arrays
from spmdzero.backend.forms._tree import map_tensors
from spmdzero.backend.replica import _keepers
from spmdzero.backend.replica._anchors import Anchors
from spmdzero.backend.replica._class_calls import calls_replaced
from spmdzero.backend.replica._recompute import Runs

INPUT = "input"
CONTEXT = "context"
_ATTENTION = F.scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where what a block keeps is between forward and backward: True is in the host's memory.

    Attributes:
        modules: id of a module in the block -> where its outputs are.
        input: where the block's inputs are.
        context: where attention's outputs are, with a kernel's statistics; None where they are
            computed again.
        named: what was written -> the ids of the modules that it names, or `CONTEXT`.
        classes: of the modules.
    """

    modules: Mapping[int, bool]
    input: bool
    context: bool | None
    named: Mapping[str, frozenset[int | str]]
    classes: frozenset[type[nn.Module]]

    @property
    def on_host(self) -> bool:
        """Whether anything is in the host's memory."""
        return self.input or bool(self.context) or any(self.modules.values())


def places_in(block: nn.Module, *, keep: Sequence[str] = (), offload: Sequence[str] = ()) -> Places:
    """The places of what the names name in `block`.

    Args:
        block: whose submodules are named, from anywhere on down: ``"q_proj"`` is
            ``"self_attn.q_proj"`` too; * is anything but a dot.
        keep, offload: names of modules, `INPUT` or `CONTEXT`.

    Raises:
        UnknownNameError: a name is of no submodule.
        TwiceNamedError: something is to be in both places.
    """
    inside = {name: module for name, module in block.named_modules() if name}
    modules: dict[int, bool] = {}
    named: dict[str, frozenset[int | str]] = {}
    for on_host, patterns in ((False, keep), (True, offload)):
        for pattern in patterns:
            if pattern == CONTEXT:
                named[CONTEXT] = frozenset([CONTEXT])
            if pattern in (INPUT, CONTEXT):
                continue
            found = matching(inside, pattern)
            if not found:
                raise UnknownNameError(pattern, [*inside])
            for name in found:
                if modules.setdefault(id(inside[name]), on_host) != on_host:
                    raise TwiceNamedError(name)
            named[pattern] = frozenset(id(inside[name]) for name in found)
    context = CONTEXT in offload if CONTEXT in (*keep, *offload) else None
    return Places(
        modules=modules,
        input=INPUT in offload,
        context=context,
        named=named,
        classes=frozenset(type(m) for m in inside.values() if id(m) in modules),
    )


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Those of a block's modules that a pattern names, from anywhere on down."""
    form = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", "[^.]*"))
    return [name for name in names if form.fullmatch(name)]


class UnknownNameError(Exception):
    """A name is of no module in a block.

    Attributes:
        pattern: the name.
        names: those of the modules that there are.
    """

    def __init__(self, pattern: str, names: list[str]) -> None:
        super().__init__(pattern)
        self.pattern, self.names = pattern, names


class TwiceNamedError(Exception):
    """A module's outputs are to be in both places; the text is its name."""


class KeptByName:
    """Keeps the outputs of some modules of a block, and attention's.

    Args:
        places: of what is kept.
        can_move: whether a value can rest in the host's memory.
        anchors: those of a loop whose body the block becomes; None where the block runs again.

    Attributes:
        runs: has the kept values of a block that runs again.
        met: the ids of the modules whose outputs were kept, and `CONTEXT`.
        kernels: number of the kernels whose results were kept.
    """

    def __init__(self, places: Places, *, can_move: bool, anchors: Anchors | None = None) -> None:
        self._places, self._can_move, self._anchors = places, can_move, anchors
        self.runs = Runs()
        self.met: set[int | str] = set()
        self.kernels = 0
        self._around = contextlib.ExitStack()

    def __enter__(self) -> "KeptByName":
        self.runs.begin()
        _keepers.enter(self)
        for kind in self._places.classes:
            self._around.enter_context(calls_replaced(kind, self._called))
        if self._places.context is not None:
            self._around.enter_context(AttentionWatch(self))
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._around.close()
        _keepers.leave()
        self.runs.end()

    def of_kernel(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that replace the results of an attention kernel."""
        where = self._places.context
        if where is None:
            return values
        self.met.add(CONTEXT)
        self.kernels += 1
        return [self._value(value.detach(), where).detach() for value in values]

    def context(self, made: torch.Tensor) -> torch.Tensor:
        """The tensor that replaces the output of attention that no kernel has computed."""
        self.met.add(CONTEXT)
        assert self._places.context is not None
        return self._kept(made, self._places.context)

    def _called(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        made = call(module, *args, **kwargs)
        where = self._places.modules.get(id(module))
        if where is None:
            return made

        def keep(_: str, tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                return tensor
            self.met.add(id(module))
            return self._kept(tensor, where)

        return map_tensors(made, keep)

    def _kept(self, made: torch.Tensor, on_host: bool) -> torch.Tensor:
        return in_place_of(made, self._value(made.detach(), on_host))

    def _value(self, made: torch.Tensor, on_host: bool) -> torch.Tensor:
        on_host = on_host and self._can_move and made.numel() > 1
        keep = self.runs.kept if self._anchors is None else self._anchors.kept
        return keep(made, on_host=on_host)


def in_place_of(made: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The value of `kept` with the graph of `made`, an equal tensor that need not be computed."""
    # Only what requires a gradient has a graph in which the value is another.
    taken: Any = _InPlaceOf.apply(made, kept) if made.requires_grad else kept
    return taken


class _InPlaceOf(torch.autograd.Function):
    """`kept` in the place of an equal tensor, which gets its gradient and isn't computed."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return arrays.apart(kept)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class KeepsAttention(_keepers.Keeper, Protocol):
    """A keeper of attention's outputs.

    Attributes:
        kernels: number of the kernels whose results it was shown.
    """

    kernels: int

    def context(self, made: torch.Tensor) -> torch.Tensor:
        """The tensor that replaces the output of attention that no kernel has computed."""


class AttentionWatch(TorchFunctionMode):
    """Hands the outputs of torch's attention to a keeper, unless a kernel has done so.

    Attributes:
        given: query, key and value of the call that runs.
    """

    def __init__(self, keeper: KeepsAttention) -> None:
        super().__init__()
        self._keeper = keeper
        self.given: tuple[torch.Tensor, ...] = ()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not _ATTENTION or not _keepers.is_innermost(self._keeper):
            return func(*args, **(kwargs or {}))
        tensors = (*args, *(kwargs or {}).values())
        self.given = tuple(t for t in tensors if isinstance(t, torch.Tensor))[:3]
        before = self._keeper.kernels
        try:
            made = func(*args, **(kwargs or {}))
            return made if self._keeper.kernels > before else self._keeper.context(made)
        finally:
            self.given = ()
