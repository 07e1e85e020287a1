"""Random draws outside of the replica region: the same operations, from another generator."""

import contextlib
import functools
import types
from typing import Any

import torch

from spmdzero._user_line import user_line
from spmdzero.backend import _named_states
from spmdzero.backend.forms._tree import mapped
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._dispatch import read, special, value_of
from spmdzero.backend.jax.lazy._generator import generator
from spmdzero.backend.jax.lazy._tensor import DEVICE, LazyTensor, hooks, over
from spmdzero.backend.jax.lazy._values import Space
from spmdzero.backend.jax.lazy._writes import write
from spmdzero.backend.replica import IN_PLACE, REPLACEMENTS, Random, has_generator, stream_of
from spmdzero.errors import ReplicaRegionError, SpmdZeroRuntimeError


class GlobalRandom(Random):
    """Draws from the devices' own generator."""

    def stream(self) -> torch.Tensor:
        """A stream that differs for each draw, but is the same on every device."""
        seed, number = generator.draw(_host.seed)
        which = torch.full((1,), number, dtype=torch.int32, device=DEVICE)
        return stream_of(which, over(seed))


def _draw(func: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(a, LazyTensor) and value_of(a).space is Space.REPLICA for a in args):
        raise ReplicaRegionError(
            f"{user_line()}: {func} draws for a replica outside of its forward, where every "
            "replica would get the same numbers. Draw in the forward"
        )
    if has_generator(args, kwargs):
        return drawn_by_generator(func, args, kwargs)
    try:
        drawn = REPLACEMENTS[IN_PLACE.get(func, func)](GlobalRandom(), *args, **kwargs)
    except ValueError as error:
        raise SpmdZeroRuntimeError(f"{user_line()}: {func}: {error}") from error
    if func not in IN_PLACE:
        return drawn
    write(args[0], value_of(drawn))
    return args[0]


for _func in (*REPLACEMENTS, *IN_PLACE):
    special(_func)(functools.partial(_draw, _func))


class RandomState(types.ModuleType):
    """The module that torch finds as ``torch.xla``; torch.utils.checkpoint resets its generator.

    A replica's draws come from the CPU's generator, which checkpointing resets too.
    """

    _initialized = True

    @staticmethod
    def device_count() -> int:
        """The number of devices for torch: one, which stands for all."""
        return 1

    @staticmethod
    def current_device() -> int:
        """The index of that device."""
        return 0

    @staticmethod
    def device(_: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which it is the current device."""
        return contextlib.nullcontext()

    @staticmethod
    def get_rng_state(_: Any = None) -> torch.Tensor:
        """The position of the generator."""
        return _named_states.noted_on(torch.tensor(generator.position, dtype=torch.int64))

    @staticmethod
    def set_rng_state(state: torch.Tensor, _: Any = None) -> None:
        """Sets the generator back to a position."""
        name, count = state.tolist()
        generator.go_to((name, count))
        _named_states.put_back_of(state)


def drawn_by_generator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Moves to the devices what `func` draws with the CPU's generator that it is given.

    The numbers are those that torch draws for tensors on the CPU. Arguments that the draw depends
    on, such as the weights of a multinomial, are read.
    """
    target = args[0] if func._schema.is_mutable else None
    if target is not None:
        # Its numbers are replaced, and where they lie decides which one is drawn first.
        form = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
        args = (form, *args[1:])
    args = mapped(tuple(args), LazyTensor, read)
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("cpu")}
    made = func(*args, **kwargs)
    if target is None:
        return over(_host.moved(made))
    write(target, _host.moved(made))
    return target


hooks.drawn = drawn_by_generator
