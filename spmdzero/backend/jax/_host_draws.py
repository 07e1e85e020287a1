"""Draws for which a script gives a `torch.Generator`: torch makes them on the host."""

from typing import Any

import torch

from spmdzero.backend.forms._tree import mapped
from spmdzero.backend.jax import _host
from spmdzero.backend.jax._dispatch import read
from spmdzero.backend.jax._tensor import LazyTensor, hooks, over
from spmdzero.backend.jax._writes import write


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
