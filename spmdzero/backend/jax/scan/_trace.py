"""Traces one block with stand-ins: its forward and its backward, as functions of tensors."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from spmdzero.backend._current import arrays, compiler
from spmdzero.backend.jax.host_memory import to_host
from spmdzero.backend.jax.lazy._factories import OwnFactories
from spmdzero.backend.jax.lazy._quirks import JaxQuirks
from spmdzero.backend.jax.scan._body import Block, Body
from spmdzero.backend.jax.scan._parts import Form, shards_of
from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.pure import ImpureError, ModuleWatch, attempt, fold_python
from spmdzero.backend.replica._anchors import Anchors, no_hooks
from spmdzero.backend.replica._candidates import NotALoopError, taken_apart
from spmdzero.backend.replica._dispatch import RegionDispatch
from spmdzero.backend.replica._gathered import GatheredAtUse
from spmdzero.backend.replica._random import ReplicaRandom


class Run:
    """The facts that a trace of a block collects; `more` holds the inputs that it adds."""

    def __init__(self) -> None:
        self.more: list[torch.Tensor] = []
        self.keys: dict[int, int] = {}
        self.uploads: list[int] = []
        self.hosts: list[torch.Tensor] = []
        self.products: list[Form] = []
        self.anchors: list[int] = []
        self.x_on_host = False
        self.output: Any = None

    def input(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.more.append(compiler.stand_in(shape, dtype))
        return len(self.more) - 1

    def key(self, value: int) -> torch.Tensor:
        # A block's own checkpointing resets the generator, and draws its keys again.
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

    def product(self, product: torch.Tensor, on_host: bool) -> torch.Tensor:
        self.products.append(Form.of(product))
        self.anchors.append(self.input(product.shape, product.dtype))
        return arrays.apart(self.more[-1])


def _gradients(
    y: torch.Tensor, ways: Sequence[torch.Tensor], dy: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of the leaves `ways`, None where y doesn't depend on a leaf.

    `torch.autograd.grad` would turn function modes off, and with them attention's kernels during
    recomputation.
    """
    arrays.backward([y], [dy], inputs=list(ways))
    found = [way.grad for way in ways]
    for way in ways:
        way.grad = None
    return found


def trace(block: Block, gathered: GatheredAtUse | None) -> Body:
    """Traces `block` for a loop; the random generators don't change.

    What `gathered` has as shards the traced block takes as shards, and gathers.

    Raises:
        NotALoopError: the block can't be the body of a loop.
    """
    tracer = _Tracer(block, gathered)
    if not torch.is_grad_enabled():
        return tracer.forward(None, saves_x=False)
    backward = tracer.backward()
    return tracer.forward(backward, saves_x=0 in backward.function.reads)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Backward:
    function: FoldedFunction
    run: "Run"
    saved: tuple[int, ...]
    shared: tuple[int, ...]
    trained: tuple[str, ...]
    gradients: tuple[Form, ...]


class _Tracer:
    def __init__(self, block: Block, gathered: GatheredAtUse | None) -> None:
        self._block = block
        self._gathered = None if gathered is None else gathered.in_body()
        self._given, self.shared = taken_apart((block.args, block.kwargs))
        self._state = block.state
        shown = {name: f"{block.name}.{name}" for name in self._state}
        self._shards = {
            name: dataclasses.replace(shard, shown=shown[name])
            for name, shard in shards_of(block.parameters, gathered).items()
        }

    @property
    def _inputs(self) -> list[torch.Tensor]:
        x = torch.empty(self._block.x.shape, dtype=self._block.x.dtype, device="meta")
        replica = torch.empty(1, dtype=torch.int32, device="meta")
        state = {name: self._shards[name].local for name in self._shards}
        return [x, *self.shared, replica, *(self._state | state).values()]

    def forward(self, backward: "_Backward | None", *, saves_x: bool) -> Body:
        run, on_host = Run(), list[bool]()
        saved = () if backward is None else backward.saved

        def function(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            products: list[tuple[torch.Tensor, bool]] = []

            def keep(product: torch.Tensor, on_host: bool) -> torch.Tensor:
                products.append((arrays.apart(product), on_host))
                return product

            with self._running(inputs, run, keep) as (x, _, y):
                run.products = [Form.of(product) for product, _ in products]
                on_host.extend(products[number][1] for number in saved)
                kept = [_at_rest(*products[number]) for number in saved]
                if saves_x:
                    on_host.insert(0, run.x_on_host)
                    kept.insert(0, _at_rest(x, True) if run.x_on_host else x * 1)
                return [t.detach() for t in (y, *kept)]

        folded = self._fold(function, self._inputs, run)
        if backward is not None and (
            (self._block.saves and run.products != backward.run.products)
            or len(run.keys) != len(backward.run.keys)
            or len(run.hosts) != len(backward.run.hosts)
        ):
            raise NotALoopError("a block computes something else each time that it is called")
        # Sort the inputs: keys come first, then uploads.
        end = len(self._inputs)
        moved = _moved(end, list(run.keys.values()), run.uploads)
        return Body(
            forward=folded.renumbered({i: moved.get(i, i) for i in folded.reads}),
            backward=None if backward is None else backward.function,
            output=run.output,
            draws=len(run.keys),
            uploads=tuple(run.hosts),
            saves_x=saves_x,
            on_host=tuple(on_host),
            saved=saved,
            forms=tuple(run.products[number] for number in saved),
            shared=() if backward is None else backward.shared,
            trained=() if backward is None else backward.trained,
            gradients=() if backward is None else backward.gradients,
            sharded=tuple(self._shards),
        )

    def backward(self) -> "_Backward":
        run = Run()
        names: list[str] = []
        forms: list[Form] = []
        wanted = [i for i, t in enumerate(self.shared) if t.requires_grad]
        trained = [n for n, p in self._block.parameters.items() if p.requires_grad]
        inputs = self._inputs
        dy = inputs[0]

        def function(given: list[torch.Tensor]) -> list[torch.Tensor]:
            own, (dy, *sums) = given[: len(inputs)], given[len(inputs) :]
            keep = run.product if self._block.saves else None
            with self._running(own, run, keep) as (x, (shared, state), y):
                ways = [x, *(shared[i] for i in wanted), *(state[name] for name in trained)]
                # Run in this thread: autograd's own threads would release tensors too late.
                with torch.autograd.set_multithreading_enabled(False):
                    grads = _gradients(y, ways, dy)
            dx = torch.zeros_like(x) if grads[0] is None else grads[0]
            totals = [
                total if grad is None else total + grad
                for total, grad in zip(sums, grads[1:], strict=False)
            ]
            of_state = self._reduced(dict(zip(trained, grads[1 + len(wanted) :], strict=True)))
            names.extend(of_state)
            forms.extend(map(Form.of, of_state.values()))
            return [dx, *totals, *of_state.values()]

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
            gradients=tuple(forms),
        )

    def _reduced(self, grads: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Those that there are; the device's parts of those of shards."""
        found: dict[str, torch.Tensor] = {}
        for name, grad in grads.items():
            shard = self._shards.get(name)
            if grad is not None and shard is not None and self._gathered is not None:
                grad = self._gathered.part(shard, grad)
            if grad is not None:
                found[name] = grad
        return found

    def _fold(
        self,
        function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        inputs: list[torch.Tensor],
        run: Run,
    ) -> FoldedFunction:
        def trace() -> FoldedFunction:
            with _autocast_keeps_nothing(), _no_global_hooks():
                more, drawn = run.more, run.keys
                folded, _ = fold_python(function, inputs, who="a block", more=more, drawn=drawn)
            # Tensors that outlive a trace are found by the stand-ins that they keep.
            run.more.clear()
            return folded

        watch = ModuleWatch(self._block.module, {})
        outcome = attempt(trace, watch=watch, who="a block")
        if isinstance(outcome, ImpureError):
            raise NotALoopError(str(outcome))
        return outcome

    @contextlib.contextmanager
    def _running(
        self,
        inputs: list[torch.Tensor],
        run: Run,
        keep: Callable[[torch.Tensor, bool], torch.Tensor] | None,
    ) -> Iterator[
        tuple[torch.Tensor, tuple[list[torch.Tensor], dict[str, torch.Tensor]], torch.Tensor]
    ]:
        """Runs the block; yields x, the shared inputs and the state that it ran on, and y.

        Inside the context, checkpoints of the block can be recomputed.
        """
        block, grad = self._block, torch.is_grad_enabled()
        end = 2 + len(self.shared)
        x, replica = inputs[0].requires_grad_(grad), inputs[end - 1]
        shared = _like(inputs[1:], self.shared, grad)
        own = _like(self._gathering(inputs[end:]), self._state.values(), grad)
        state = dict(zip(self._state, own, strict=True))
        values = arrays.value_ids([x, *shared, *state.values()])
        given = args, kwargs = self._given.filled(shared)
        dispatch = RegionDispatch(
            random=ReplicaRandom(replica, run.key),
            read=_refuse_read,
            upload=run.upload,
            owner=block.module,
            quirks=JaxQuirks(),
            gathered=self._gathered,
        )
        anchors = Anchors(keep or _unchanged)
        inside, gathers = OwnFactories(), self._gathered or contextlib.nullcontext()
        replaced = _reparametrize_module(block.module, state)
        with gathers, anchors, dispatch, inside, no_hooks(), replaced:
            anchors.active = keep is not None
            output = block.call(block.module, x, *args, **kwargs)
            anchors.active = False
            run.x_on_host = anchors.input_on_host
            if values != arrays.value_ids([x, *shared, *state.values()]):
                raise NotALoopError("a block writes to its parameters, buffers or inputs")
            now, tensors = taken_apart(given)
            if now != self._given or [*map(id, tensors)] != [*map(id, shared)]:
                raise NotALoopError("a block changes what it is given")
            yield x, (shared, state), self._output(output, run)

    def _gathering(self, state: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The block's state, of which stand-ins are gathered where they are used."""
        for name, tensor in zip(self._state, state, strict=False):
            shard = self._shards.get(name)
            if shard is not None and self._gathered is not None:
                tensor = self._gathered.stand_in(dataclasses.replace(shard, local=tensor))
            yield tensor

    def _output(self, output: Any, run: Run) -> torch.Tensor:
        run.output, tensors = taken_apart(output)
        if len(tensors) != 1:
            raise NotALoopError(f"a block returns {len(tensors)} tensors, and not one")
        (y,) = tensors
        if Form.of(y) != self._block.x:
            raise NotALoopError(
                f"a block takes {list(self._block.x.shape)} in {self._block.x.dtype}, and returns "
                f"{list(y.shape)} in {y.dtype}"
            )
        if torch.is_grad_enabled() and not y.requires_grad:
            raise NotALoopError("no gradient reaches a block's output")
        return y


def _like(
    given: Iterable[torch.Tensor], own: Iterable[torch.Tensor], grad: bool
) -> list[torch.Tensor]:
    """The first tensors of `given`, one for each of `own`, requiring gradients as those do."""
    return [
        tensor.requires_grad_(grad and like.requires_grad)
        for tensor, like in zip(given, own, strict=False)
    ]


def _unchanged(tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
    return tensor


def _at_rest(tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
    return to_host(tensor.detach()) if on_host else tensor


def _moved(end: int, *kinds: list[int]) -> dict[int, int]:
    """Maps inputs that the trace added to their places when sorted by kind."""
    order = [place for kind in kinds for place in kind]
    return {end + place: end + new for new, place in enumerate(order)}


@contextlib.contextmanager
def _autocast_keeps_nothing() -> Iterator[None]:
    """Keeps autocast from caching casts of stand-ins for parameters."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Turns off hooks on all modules, which name operations and would hold autograd's nodes."""
    hooks = nn.modules.module._global_forward_hooks
    before = nn.modules.module._global_forward_pre_hooks
    with mock.patch.dict(hooks, clear=True), mock.patch.dict(before, clear=True):
        yield


def _refuse_read(_: torch.Tensor) -> torch.Tensor:
    raise NotALoopError("a block reads a value from the devices")
