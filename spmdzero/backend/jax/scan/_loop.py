"""Equal blocks as one operation, and their backward as another."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from spmdzero.backend.jax.scan._body import Body
from spmdzero.backend.jax.scan._loop_op import run_loop
from spmdzero.backend.jax.scan._parts import Form
from spmdzero.backend.jax.scan._unrolled import Tensors, Unrolled
from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.replica._anchors import no_hooks
from spmdzero.backend.replica._gathered import Shard


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """The inputs of the blocks, in replica space.

    Attributes:
        x: the first block's input.
        shared: tensors that are the same for each block.
        replica: the replica's number, `[1]` int32.
        parameters, buffers: of each block, by name.
        shards: of each block the parameters that it gathers itself, by name.
        awaiting: of each block the tensors that take the parts of their gradients.
        keys: the keys of each block's draws, 0-dim int32 each.
        uploads: the same for each block.
        enter: maps a whole tensor to every replica's copy.
    """

    x: torch.Tensor
    shared: Sequence[torch.Tensor]
    replica: torch.Tensor
    parameters: Sequence[dict[str, torch.Tensor]]
    shards: Sequence[dict[str, Shard]]
    awaiting: Sequence[Sequence[torch.Tensor]]
    buffers: Sequence[dict[str, torch.Tensor]]
    keys: Sequence[Sequence[torch.Tensor]]
    uploads: Sequence[torch.Tensor]
    enter: Callable[[torch.Tensor], torch.Tensor]


def run(body: Body, given: Given, unrolled: Unrolled) -> torch.Tensor:
    """The last block's output; `unrolled` has the same blocks."""
    parameters = [t for block in given.parameters for t in block.values()]
    awaiting = [t for block in given.awaiting for t in block]
    tensors = given.x, *given.shared, *parameters, *awaiting
    with no_hooks():
        return cast(torch.Tensor, _Blocks.apply(body, given, unrolled, *tensors))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        body: Body,
        given: Given,
        unrolled: Unrolled,
        x: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Any:
        names, buffers = list(given.parameters[0]), list(given.buffers[0])
        local = [{n: shard.local for n, shard in shards.items()} for shards in given.shards]
        rests = [whole | own for whole, own in zip(given.parameters, local, strict=True)]
        sliced = _stacks(rests) + _stacks(given.buffers)
        keys = [torch.stack(list(column)) for column in zip(*given.keys, strict=True)]
        whole = [*given.shared, given.replica]
        made = [*([Form.of(x)] if body.saves_x else []), *body.forms]
        y, *saved = _call(
            body.forward,
            times=len(given.parameters),
            # This is the order of the traced block's inputs.
            kinds=[
                ("carried", [x]),
                ("whole", whole),
                ("sliced", sliced),
                ("sliced", keys),
                ("whole", given.uploads),
            ],
            made=made,
            enter=given.enter,
        )
        if unrolled.gathered is not None:
            unrolled.gathered.passed(y)
        ctx.body, ctx.names, ctx.buffers, ctx.times = body, names, buffers, len(given.parameters)
        ctx.enter, ctx.unrolled = given.enter, unrolled
        ctx.counts = len(given.shared), len(sliced), len(keys), len(given.uploads)
        own = tensors[len(given.shared) :][: len(given.parameters) * len(names)]
        ctx.awaiting = sum(map(len, given.awaiting))
        ctx.save_for_backward(*own, x, *whole, *sliced, *keys, *given.uploads, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        body: Body = ctx.body
        assert body.backward is not None
        end = ctx.times * len(ctx.names)
        own, (x, *rest) = ctx.saved_tensors[:end], ctx.saved_tensors[end:]
        shared, sliced, keys, uploads = ctx.counts
        whole, rest = rest[: shared + 1], rest[shared + 1 :]
        stacks, rest = rest[:sliced], rest[sliced:]
        keys, rest = rest[:keys], rest[keys:]
        uploads, saved = rest[:uploads], rest[uploads:]
        if torch.is_grad_enabled():
            # The loop's backward can't be differentiated: run the blocks one by one.
            count = len(ctx.names)
            parameters = [own[block * count : (block + 1) * count] for block in range(ctx.times)]
            buffers = [[stack[block] for stack in stacks[count:]] for block in range(ctx.times)]
            tensors = Tensors(
                x=x,
                shared=whole[:shared],
                replica=whole[shared],
                parameters=[dict(zip(ctx.names, some, strict=True)) for some in parameters],
                buffers=[dict(zip(ctx.buffers, some, strict=True)) for some in buffers],
                keys=[[column[block] for column in keys] for block in range(ctx.times)],
            )
            found = ctx.unrolled.gradients(tensors, *grad_outputs)
            return None, None, None, *found, *[None] * ctx.awaiting
        # A body that doesn't read x gets the x at hand.
        kept = [
            ("fetched" if on_host else "sliced", [stack])
            for stack, on_host in zip(saved, body.on_host, strict=True)
        ]
        sums = [torch.zeros_like(whole[i]) for i in body.shared]
        own = kept.pop(0) if body.saves_x else ("unread", [x])
        outputs = _call(
            body.backward,
            times=ctx.times,
            backwards=True,
            kinds=[
                own,
                ("whole", whole),
                ("sliced", stacks),
                ("carried", [grad_outputs[0], *sums]),
                ("sliced", keys),
                ("whole", uploads),
                *kept,
            ],
            made=body.gradients,
            enter=ctx.enter,
        )
        dx, *outputs = outputs
        if ctx.unrolled.gathered is not None:
            ctx.unrolled.gathered.passed(dx)
        return None, None, None, dx, *_by_input(body, outputs, ctx)


def _by_input(body: Body, outputs: Sequence[torch.Tensor], ctx: Any) -> list[torch.Tensor | None]:
    """Lists what the backward's loop returns after dx, for each input of the forward after x."""
    shared = len(body.shared)
    sums = dict(zip(body.shared, outputs[:shared], strict=True))
    slices = {
        name: stack.unbind() for name, stack in zip(body.trained, outputs[shared:], strict=True)
    }
    # Of a shard the gradient is a part, and goes to what awaits parts.
    parts = {name: slices.pop(name) for name in body.trained if name in body.sharded}
    return [
        *(sums.get(place) for place in range(ctx.counts[0])),
        *(
            slices[name][block] if name in slices else None
            for block in range(ctx.times)
            for name in ctx.names
        ),
        *(parts[name][block] for block in range(ctx.times) for name in parts),
    ]


def _stacks(blocks: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([block[name] for block in blocks]) for name in blocks[0]]


def _one(stack: torch.Tensor) -> Form:
    return Form(tuple(stack.shape[1:]), stack.dtype)


def _call(
    function: FoldedFunction,
    *,
    times: int,
    kinds: Sequence[tuple[str, Sequence[torch.Tensor]]],
    made: Sequence[Form],
    enter: Callable[[torch.Tensor], torch.Tensor],
    backwards: bool = False,
) -> list[torch.Tensor]:
    """Runs the loop; returns its last carried values and its stacks.

    Args:
        function: one iteration.
        times, backwards, made: see `run_loop`.
        enter: see `Given`.
        kinds: the inputs in the order of `function`, and how each enters the loop.
    """
    places: dict[str, list[int]] = {
        kind: [] for kind in ("carried", "sliced", "fetched", "whole", "unread")
    }
    tensors: list[torch.Tensor] = []
    end = sum(len(some) for _, some in kinds)
    constants = iter(range(end, end + len(function.constants)))
    arrangement = [next(constants) if place is None else place for place in function.arrangement]
    # These are numbers that Python made: as the program's parameters they belong to no replica.
    numbers = [enter(constant) for constant in function.constants]
    for kind, some in [*kinds, ("whole", numbers)]:
        for tensor in some:
            places[kind].append(len(tensors))
            tensors.append(tensor)
    stacks = [*places["sliced"], *places["fetched"]]
    order = [*places["carried"], *stacks, *places["whole"]]
    # Inputs that no iteration reads would only be passed through.
    read = {*places["carried"], *arrangement}
    order = [place for place in order if place in read]
    moved = {place: new for new, place in enumerate(order)}
    return run_loop(
        function,
        [tensors[place] for place in order],
        times=times,
        backwards=backwards,
        arrangement=tuple(moved[place] for place in arrangement),
        carried=tuple(Form.of(tensors[place]) for place in places["carried"]),
        sliced=tuple(_one(tensors[place]) for place in stacks if place in read),
        fetched=sum(place in read for place in places["fetched"]),
        made=tuple(made),
    )
