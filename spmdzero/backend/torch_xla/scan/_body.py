"""One block, traced with stand-ins: its forward, and its backward, as functions of tensors."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from spmdzero.backend._compiler import StandInKeptError
from spmdzero.backend._keys import draw_keys
from spmdzero.backend.torch_xla import _private, folding
from spmdzero.backend.torch_xla._dispatch import RegionDispatch
from spmdzero.backend.torch_xla._kept import kept_tensors
from spmdzero.backend.torch_xla._private.loops import Form
from spmdzero.backend.torch_xla._random import ReplicaRandom
from spmdzero.backend.torch_xla.folding import FoldedFunction
from spmdzero.backend.torch_xla.scan._anchors import Anchors, no_hooks
from spmdzero.backend.torch_xla.scan._plain import flatten, unflatten
from spmdzero.backend.torch_xla.scan._refused import NotALoopError
from spmdzero.backend.torch_xla.strangers import ProgramInput, record_uploads, strangers
from spmdzero.errors import SpmdZeroError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A block as it is called.

    Attributes:
        module: its parameters are the replica's.
        call: runs it, in the place of its own call.
        args, kwargs: what it is given after its first argument.
        x: shape and dtype of that.
        saves: whether products are kept for the backward, which otherwise computes all again.
    """

    module: nn.Module
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: Form
    saves: bool

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """By name."""
        return dict(self.module.named_parameters())

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return self.parameters | dict(self.module.named_buffers())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Body:
    """A traced block.

    The inputs of `forward` are x, what is shared by all blocks, the replica's number, the block's
    parameters and buffers; then come the keys of its draws, and what it uploads. It returns y, and
    what is saved. Those of `backward` are the same and then dy, one gradient for each of `shared`
    so far, the keys, the uploads, and the saved products. It returns dx, the gradients of `shared`
    with what came in, and those of `trained`.

    Attributes:
        output: the form of what the block returns.
        draws: keys that it draws.
        uploads: values on the CPU that it uploads.
        saves_x: whether its backward needs x.
        saved: the products that its backward needs, by number.
        forms: of these.
        shared: of the shared inputs those that have a gradient.
        trained: the parameters that have one.
    """

    forward: FoldedFunction
    backward: FoldedFunction | None
    output: Any
    draws: int
    uploads: tuple[torch.Tensor, ...]
    saves_x: bool = False
    saved: tuple[int, ...] = ()
    forms: tuple[Form, ...] = ()
    shared: tuple[int, ...] = ()
    trained: tuple[str, ...] = ()

    def is_same(self, other: "Body") -> bool:
        """Whether two blocks compute the same."""
        return (
            _program(self) == _program(other)
            and all(
                one.dtype == another.dtype and torch.equal(one, another)
                for one, another in zip(self.uploads, other.uploads, strict=True)
            )
            and all(
                folding.same_value(one.tensor, another.tensor)
                for one, another in zip(_constants(self), _constants(other), strict=True)
            )
        )


def _constants(body: Body) -> list[ProgramInput]:
    functions = [f for f in (body.forward, body.backward) if f is not None]
    return [constant for function in functions for constant in function.constants]


def _program(body: Body) -> tuple[Any, ...]:
    functions = [f for f in (body.forward, body.backward) if f is not None]
    return (
        *((f.proto, f.arrangement) for f in functions),
        *(body.output, body.draws, len(body.uploads), body.saves_x, body.saved, body.forms),
        *(body.shared, body.trained),
    )


def trace(block: Block) -> Body:
    """Traces `block`; draws nothing.

    Raises:
        NotALoopError: it can't be the body of a loop.
    """
    tracer = _Tracer(block)
    if not torch.is_grad_enabled():
        return tracer.forward(None, saves_x=False)
    backward = tracer.backward()
    return tracer.forward(backward, saves_x=0 in backward.function.reads)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Backward:
    function: FoldedFunction
    run: "_Run"
    saved: tuple[int, ...]
    shared: tuple[int, ...]
    trained: tuple[str, ...]


class _Run:
    """What a trace of the block found out: it appends inputs to `more`."""

    def __init__(self) -> None:
        self.more: list[torch.Tensor] = []
        self.keys: dict[int, int] = {}
        self.uploads: list[int] = []
        self.hosts: list[torch.Tensor] = []
        self.products: list[Form] = []
        self.anchors: list[int] = []
        self.output: Any = None

    def input(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.more.append(folding.stand_in(shape, dtype))
        return len(self.more) - 1

    def key(self, value: int) -> torch.Tensor:
        # What a block checkpoints inside of it draws its keys again, from a generator set back.
        if value not in self.keys:
            self.keys[value] = self.input((), torch.int32)
        return self.more[self.keys[value]]

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        for known, place in zip(self.hosts, self.uploads, strict=True):
            if known.dtype == host.dtype and torch.equal(known, host):
                return self.more[place]
        self.hosts.append(host.detach().clone())
        self.uploads.append(self.input(host.shape, host.dtype))
        return self.more[-1]

    def product(self, product: torch.Tensor) -> torch.Tensor:
        self.products.append(Form.of(product))
        self.anchors.append(self.input(product.shape, product.dtype))
        return self.more[-1]


class _Tracer:
    def __init__(self, block: Block) -> None:
        self._block = block
        self.shared, self._form = flatten((block.args, block.kwargs))
        self._state = block.state

    @property
    def _inputs(self) -> list[torch.Tensor]:
        x = self._block.x
        replica = torch.empty(1, dtype=torch.int32)
        return [torch.empty(x.shape, dtype=x.dtype, device="meta"), *self.shared, replica] + list(
            self._state.values()
        )

    def forward(self, backward: "_Backward | None", *, saves_x: bool) -> Body:
        run = _Run()
        saved = () if backward is None else backward.saved

        def function(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            products: list[torch.Tensor] = []
            x, _, y = self._run(inputs, run, lambda product: products.append(product) or product)
            run.products = [Form.of(product) for product in products]
            kept = [products[number] for number in saved]
            return [t.detach() for t in (y, *([x * 1] if saves_x else []), *kept)]

        folded = self._fold(function, self._inputs, run)
        if backward is not None and (
            (self._block.saves and run.products != backward.run.products)
            or len(run.keys) != len(backward.run.keys)
            or len(run.hosts) != len(backward.run.hosts)
        ):
            raise NotALoopError("a block computes something else each time that it is called")
        # Keys and uploads come in the order of their kinds.
        end = len(self._inputs)
        moved = _moved(end, list(run.keys.values()), run.uploads)
        return Body(
            forward=folded.renumbered({i: moved.get(i, i) for i in folded.reads}),
            backward=None if backward is None else backward.function,
            output=run.output,
            draws=len(run.keys),
            uploads=tuple(run.hosts),
            saves_x=saves_x,
            saved=saved,
            forms=tuple(run.products[number] for number in saved),
            shared=() if backward is None else backward.shared,
            trained=() if backward is None else backward.trained,
        )

    def backward(self) -> "_Backward":
        run = _Run()
        found: list[tuple[int, ...]] = []
        names: list[str] = []
        wanted = [i for i, t in enumerate(self.shared) if t.requires_grad]
        trained = [n for n, p in self._block.parameters.items() if p.requires_grad]
        inputs = self._inputs
        dy = inputs[0]

        def function(given: list[torch.Tensor]) -> list[torch.Tensor]:
            own, (dy, *sums) = given[: len(inputs)], given[len(inputs) :]
            x, (shared, state), y = self._run(own, run, run.product if self._block.saves else None)
            if not y.requires_grad:
                raise NotALoopError("no gradient reaches a block's output")
            ways = [x, *(shared[i] for i in wanted), *(state[name] for name in trained)]
            # In this thread: autograd's own would let go of tensors too late.
            with torch.autograd.set_multithreading_enabled(False):
                grads = torch.autograd.grad([y], ways, [dy], allow_unused=True)
            dx = torch.zeros_like(x) if grads[0] is None else grads[0]
            totals = [
                total if grad is None else total + grad
                for total, grad in zip(sums, grads[1:], strict=False)
            ]
            of_state = list(zip(trained, grads[1 + len(wanted) :], strict=True))
            names.extend(name for name, grad in of_state if grad is not None)
            found.append(tuple(wanted))
            return [dx, *totals, *(grad for _, grad in of_state if grad is not None)]

        given = [*inputs, dy, *(self.shared[i] for i in wanted)]
        folded = self._fold(function, given, run)
        end = len(given)
        saved = tuple(
            number for number, place in enumerate(run.anchors) if end + place in folded.reads
        )
        kinds = list(run.keys.values()), run.uploads, [run.anchors[number] for number in saved]
        moved = _moved(end, *kinds)
        return _Backward(
            function=folded.renumbered({i: moved.get(i, i) for i in folded.reads}),
            run=run,
            saved=saved,
            shared=tuple(wanted),
            trained=tuple(names),
        )

    def _fold(
        self,
        function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        inputs: list[torch.Tensor],
        run: _Run,
    ) -> FoldedFunction:
        kept = kept_tensors(self._block.module)
        try:
            with (
                record_uploads() as uploads,
                _nothing_else_drawn(run),
                folding.no_stand_in_left(),
                _autocast_keeps_nothing(),
            ):
                folded = folding.fold(function, inputs, more=run.more)
        except StandInKeptError:
            raise NotALoopError("a block keeps a tensor outside of itself") from None
        except (SpmdZeroError, RuntimeError) as error:
            # The error isn't kept: its frames hold what was traced.
            raise NotALoopError(f"a block can't be traced apart from the others: {error}") from None
        after = kept_tensors(self._block.module)
        if any(kept.get(place) is not value for place, value in after.items()):
            raise NotALoopError("a block keeps a tensor in an attribute")
        for found in strangers(folded.constants, uploads):
            raise NotALoopError(
                f"a block uses a tensor {list(found.tensor.shape)} that is neither its own nor given"
            )
        return folded

    def _run(
        self,
        inputs: list[torch.Tensor],
        run: _Run,
        keep: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[list[torch.Tensor], dict[str, torch.Tensor]], torch.Tensor]:
        """x, the shared inputs and the state that the block ran on, and y."""
        block, grad = self._block, torch.is_grad_enabled()
        end = 2 + len(self.shared)
        x, replica = inputs[0].requires_grad_(grad), inputs[end - 1]
        shared = [
            given.requires_grad_(grad and own.requires_grad)
            for given, own in zip(inputs[1:], self.shared, strict=False)
        ]
        state = {
            name: given.requires_grad_(grad and own.requires_grad)
            for given, (name, own) in zip(inputs[end:], self._state.items(), strict=False)
        }
        versions = [t._version for t in (x, *shared, *state.values())]
        args, kwargs = unflatten(self._form, list(shared))
        dispatch = RegionDispatch(
            random=ReplicaRandom(replica, run.key),
            read=_refuse_read,
            read_fixed=_refuse_read,
            upload=run.upload,
            owner=block.module,
        )
        anchors = contextlib.nullcontext() if keep is None else Anchors(keep)
        with anchors, dispatch, no_hooks(), _reparametrize_module(block.module, state):
            output = block.call(block.module, x, *args, **kwargs)
        if versions != [t._version for t in (x, *shared, *state.values())] or any(
            dispatch.wrote(t) for t in state.values()
        ):
            raise NotALoopError("a block writes to its buffers or its inputs")
        tensors, run.output = flatten(output)
        if len(tensors) != 1:
            raise NotALoopError(f"a block returns {len(tensors)} tensors, and not one")
        (y,) = tensors
        if Form.of(y) != block.x:
            raise NotALoopError(
                f"a block takes {list(block.x.shape)} in {block.x.dtype}, and returns "
                f"{list(y.shape)} in {y.dtype}"
            )
        return x, (shared, state), y


def _moved(end: int, *kinds: list[int]) -> dict[int, int]:
    """Where inputs that were found out about stand when they are sorted by kind."""
    order = [place for kind in kinds for place in kind]
    return {end + place: end + new for new, place in enumerate(order)}


@contextlib.contextmanager
def _nothing_else_drawn(run: _Run) -> Iterator[None]:
    """Draws nothing; refuses what draws from a generator other than by keys."""
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        draw_keys(len(run.keys))
        same = (
            torch.equal(after, torch.get_rng_state())
            and python == random.getstate()
            and repr(numpy) == repr(np.random.get_state())
        )
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        np.random.set_state(numpy)
    if not same:
        raise NotALoopError("a block draws random numbers in Python")


@contextlib.contextmanager
def _autocast_keeps_nothing() -> Iterator[None]:
    """autocast would keep stand-ins of parameters that it has cast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _refuse_read(_: torch.Tensor) -> torch.Tensor:
    raise NotALoopError("a block reads a value from the devices")
