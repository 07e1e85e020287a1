"""A repeated computation as one loop of a program."""

from collections.abc import Sequence
from typing import Any

import torch_xla.core.xla_builder as xb

from spmdzero.backend.scan import Form


def loop(
    body: Any,
    *,
    times: int,
    backwards: bool,
    arrangement: Sequence[int],
    carried: Sequence[Form],
    sliced: Sequence[Form],
    whole: Sequence[Form],
    made: Sequence[Form],
) -> Any:
    """A computation that calls `body` `times` times.

    Args:
        body: one iteration; returns the carried values and its results.
        backwards: whether the iterations run from the last slice to the first.
        arrangement: for each parameter of `body` its index among carried, sliced and whole inputs.
        carried: forms of the inputs of the first iteration, which each iteration replaces.
        sliced: forms of an iteration's own inputs; the loop takes them stacked, `[times, ...]`.
        whole: forms of inputs that are the same in each iteration.
        made: forms of an iteration's results, which the loop returns stacked.

    Returns a computation that maps carried, stacked and whole inputs to the last carried values
    and the stacks.
    """
    builder = xb.create_builder("loop")
    stacks = [Form((times, *form.shape), form.dtype) for form in sliced]
    inputs = [
        xb.mkparam(builder, number, xb.mkshape(xb.Op.from_torch_type(form.dtype), form.shape))
        for number, form in enumerate([*carried, *stacks, *whole])
    ]
    empty = [
        xb.Op.scalar(builder, 0, dtype=xb.Op.from_torch_type(form.dtype)).broadcast(
            (times, *form.shape)
        )
        for form in made
    ]
    ends = len(carried), len(carried) + len(sliced), len(inputs)

    def more(count: xb.Op, *_: xb.Op) -> xb.Op:
        return count < _number(count, times)

    def run(count: xb.Op, *state: xb.Op) -> tuple[xb.Op, ...]:
        at = _number(count, times - 1) - count if backwards else count
        given = [
            _slice(value, at) if ends[0] <= place < ends[1] else value
            for place, value in enumerate(state[: ends[2]])
        ]
        result = xb.Op.call(body, [given[place] for place in arrangement], builder=count.builder())
        new = [result.get_tuple_element(i) for i in range(len(carried) + len(made))]
        stacked = [
            _update(stack, value, at)
            for stack, value in zip(state[ends[2] :], new[len(carried) :], strict=True)
        ]
        kept = state[ends[0] : ends[2]]
        return (count + _number(count, 1), *new[: len(carried)], *kept, *stacked)

    start = xb.Op.scalar(builder, 0, dtype=xb.Type.S32)
    last = xb.Op.mkwhile([start, *inputs, *empty], more, run)
    places = [*range(1, 1 + len(carried)), *range(1 + ends[2], 1 + ends[2] + len(made))]
    return xb.Op.tuple([last.get_tuple_element(place) for place in places]).build("loop")


def _number(like: xb.Op, value: int) -> xb.Op:
    return xb.Op.scalar(like.builder(), value, dtype=xb.Type.S32)


def _slice(stack: xb.Op, at: xb.Op) -> xb.Op:
    sizes = stack.shape().sizes
    starts = [at, *(_number(at, 0) for _ in sizes[1:])]
    return stack.dynamic_slice(starts, (1, *sizes[1:])).reshape(tuple(sizes[1:]))


def _update(stack: xb.Op, value: xb.Op, at: xb.Op) -> xb.Op:
    sizes = stack.shape().sizes
    starts = [at, *(_number(at, 0) for _ in sizes[1:])]
    return stack.dynamic_update_slice(value.reshape((1, *sizes[1:])), starts)
