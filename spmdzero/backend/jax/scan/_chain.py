"""Chains of called blocks that haven't run yet."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmdzero.backend._current import current
from spmdzero.backend._keys import draw_key
from spmdzero.backend.forms._tree import found
from spmdzero.backend.jax.lazy._pending_block import StandIn, followed_error
from spmdzero.backend.jax.scan._body import Body
from spmdzero.backend.jax.scan._loop import Given, run
from spmdzero.backend.jax.scan._parts import shards_of
from spmdzero.backend.jax.scan._unrolled import Unrolled
from spmdzero.backend.replica import _keepers
from spmdzero.backend.replica._anchors import no_hooks
from spmdzero.backend.replica._around import Provided
from spmdzero.backend.replica._candidates import FEWEST, surroundings, taken_apart
from spmdzero.backend.replica._gathered import Shard


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The call of one block.

    Attributes:
        module: the block.
        call: runs the module.
        args, kwargs: the arguments after the first one.
        keys: the keys of its draws.
        run: runs it by itself, where it becomes no part of a loop.
    """

    module: nn.Module
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: tuple[int, ...]
    run: Callable[..., Any]


class Chain:
    """Blocks each of which takes the output of the one before.

    Args:
        body: the traced first block.
        x: the first block's input.
        shared: the tensors that each block takes beside.
        provided: the inputs of the forward.
        kept: is called if blocks run one by one as the script keeps what one returned.

    Attributes:
        last: the place of the latest block in its row.
        surroundings: the settings under which the blocks are called.
    """

    def __init__(
        self,
        body: Body,
        x: torch.Tensor,
        shared: Sequence[torch.Tensor],
        provided: Provided,
        *,
        last: int,
        kept: Callable[[], None],
    ) -> None:
        self.body, self.shared, self.last = body, shared, last
        self._x, self._provided, self._kept = x, provided, kept
        self._calls: list[Call] = []
        self._made: list[weakref.ref[StandIn]] = []
        self._values: dict[int, torch.Tensor] = {}
        self._start = torch.get_rng_state()
        self.surroundings = surroundings()

    @property
    def is_real(self) -> bool:
        """Whether its blocks have run."""
        return bool(self._values)

    def draw(self) -> tuple[int, ...]:
        """Draws the keys of one more block."""
        keys = tuple(draw_key() for _ in range(self.body.draws))
        self._state = torch.get_rng_state()
        return keys

    def expects(self, x: Any) -> bool:
        """Whether `x` is the latest block's output, with nothing drawn since."""
        return (
            not self.is_real
            and self._made[-1]() is x
            and surroundings() == self.surroundings
            and torch.equal(self._state, torch.get_rng_state())
        )

    def add(self, call: Call) -> Any:
        """Adds a call, and returns its pending output."""
        self._calls.append(call)
        number = len(self._calls)
        made = StandIn.of(self._x, lambda: self.value(number))
        self._made.append(weakref.ref(made))
        return self.body.output.filled([made])

    def value(self, number: int) -> torch.Tensor:
        """The output of the block of call `number`, counted from 1."""
        if not self._values:
            self._run()
        if number not in self._values:
            # Only the next block held this value when the loop was made, so that it wasn't
            # returned.
            raise followed_error()
        return self._values[number]

    def _run(self) -> None:
        end = len(self._calls)
        kept = [made() for made in self._made[:-2]]
        with _as_then(self.surroundings):
            held = any(made is not None for made in kept)
            if held and end >= FEWEST:
                self._kept()
            if held or end < FEWEST:
                # The last block's own checkpoint is around this, which keeps none of the others.
                with no_hooks(), _keepers.set_aside():
                    self._run_each()
            else:
                unrolled = Unrolled(
                    blocks=[(call.module, call.call) for call in self._calls],
                    form=taken_apart((self._calls[0].args, self._calls[0].kwargs))[0],
                    around=functools.partial(_as_then, self.surroundings),
                    upload=self._provided.upload,
                    gathered=self._provided.gathered,
                )
                self._values[end] = run(self.body, self._given(), unrolled)
        self._calls.clear()

    def _given(self) -> Given:
        blocks, provided = [call.module for call in self._calls], self._provided
        parameters: list[dict[str, torch.Tensor]] = [dict(b.named_parameters()) for b in blocks]
        shards = [shards_of(found, provided.gathered) for found in parameters]
        return Given(
            x=self._x,
            shared=self.shared,
            replica=provided.random.replica,
            parameters=parameters,
            shards=shards,
            awaiting=[self._awaiting(found) for found in shards],
            buffers=[dict(block.named_buffers()) for block in blocks],
            keys=[[provided.random.key(key) for key in call.keys] for call in self._calls],
            uploads=[provided.upload(host) for host in self.body.uploads],
            enter=provided.enter_whole,
        )

    def _awaiting(self, shards: Mapping[str, Shard]) -> list[torch.Tensor]:
        """Takes the parts of one block's gradients, in the order of `trained`."""
        trained = zip(self.body.trained, self.body.gradients, strict=True)
        gathered = self._provided.gathered
        return [
            gathered.awaiting_part(shards[name], form.dtype)
            for name, form in trained
            if gathered is not None and name in shards
        ]

    def _run_each(self) -> None:
        x, after = self._x, torch.get_rng_state()
        torch.set_rng_state(self._start)
        for number, call in enumerate(self._calls, 1):
            output = call.run(call.call, call.module, x, *call.args, **call.kwargs)
            self._values[number] = x = found(output, torch.Tensor)[0]
        torch.set_rng_state(after)


@contextlib.contextmanager
def _as_then(then: tuple[Any, ...]) -> Iterator[None]:
    grad, autocasts, dtype = then
    cast = torch.autocast(current().device_type, dtype=dtype, enabled=autocasts)
    with torch.set_grad_enabled(grad), cast:
        yield
