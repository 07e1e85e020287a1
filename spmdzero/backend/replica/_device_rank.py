"""The rank that `torch.distributed.get_rank()` has in a forward: another number on each replica."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What a method of a tensor computes of one number and another.
_SUMS = {"add": 1, "__add__": 1, "__radd__": 1, "sub": -1, "__sub__": -1}
_PRODUCTS = ("mul", "__mul__", "__rmul__")
_READS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
_COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "gt")
_Term = tuple[torch.Tensor, int, int]


class DeviceRank(TorchFunctionMode):
    """A function mode in which the rank may be used as scripts use it.

    The rank is a tensor, so arithmetic with it is right by itself. Where torch or Python want a
    number, this mode knows those that are `factor * rank + offset`: the bounds of `arange` and of
    slices, an index of a tensor, and the place of a list that `all_gather` has filled, where a
    script puts its own rows, which have a gradient. Whatever else needs a number is refused.

    Args:
        size: number of replicas.
        number: makes the replica's number, 0-dim int64.
        error: makes the error about a call of the user's line.
    """

    def __init__(
        self,
        size: int,
        number: Callable[[], torch.Tensor],
        error: Callable[[str], Exception],
    ) -> None:
        super().__init__()
        self._size, self._make, self._error = size, number, error
        self._terms: dict[int, _Term] = {}
        self._compared: list[torch.Tensor] = []
        # The tensors of a filled list by identity: their place, all of them, what was gathered.
        self._filled: dict[int, tuple[int, Sequence[torch.Tensor], torch.Tensor]] = {}
        # One error for each list index that was answered and hasn't been found in a list yet.
        self._indices: list[Exception] = []

    def asked(self) -> torch.Tensor:
        """The rank."""
        return self._note(self._make(), 1, 0)

    def filled(self, tensors: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Records the places that a gather has filled, and what it gathered."""
        for place, tensor in enumerate(tensors):
            self._filled[id(tensor)] = place, tensors, own

    def finish(self) -> None:
        """Raises the error about a rank that was used as an index of anything else."""
        # A backward holds the pass's collectives. Tensors that they held in turn, with their graph,
        # would be a circle, of which Python's collector empties tensors that are still needed.
        self._terms.clear()
        self._compared.clear()
        self._filled.clear()
        if self._indices:
            raise self._indices[0]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._filled:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, list):
                    self._put_in_its_place(arg)
        return self._answered(func, args, kwargs) if self._terms else func(*args, **kwargs)

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args:
            return self._read(func, name, *args)
        if name in ("__getitem__", "__setitem__") and (rows := self._rows(*args[:2])) is not None:
            return self._at(name, rows, *args)
        if func is torch.arange and 1 < len(args) < 4 and "out" not in kwargs:
            start, end = self._term(args[0]), self._term(args[1])
            if start and end and start[1] == end[1] != 0 and args[2:] in ((), (1,)):
                return torch.arange(end[2] - start[2], **_on(args[0], kwargs)) + args[0]
        made = func(*args, **kwargs)
        if args and id(args[0]) in self._terms and made is args[0]:
            # It was written in place.
            del self._terms[id(made)]
        elif isinstance(made, torch.Tensor) and len(args) == 2 and not kwargs:
            self._follow(name, made, *args)
        return made

    def _note(self, tensor: torch.Tensor, factor: int, offset: int) -> torch.Tensor:
        self._terms[id(tensor)] = tensor, factor, offset
        return tensor

    def _term(self, value: Any) -> _Term | None:
        if type(value) is int:
            return torch.empty(0), 0, value
        return self._terms.get(id(value))

    def _follow(self, name: str, made: torch.Tensor, one: Any, other: Any) -> None:
        left, right = self._term(one), self._term(other)
        if not left or not right:
            return
        if name in _SUMS:
            sign = _SUMS[name]
            self._note(made, left[1] + sign * right[1], left[2] + sign * right[2])
        elif name in ("__rsub__", "rsub"):
            self._note(made, right[1] - left[1], right[2] - left[2])
        elif name in _PRODUCTS and 0 in (left[1], right[1]):
            (_, factor, offset), by = (left, right[2]) if left[1] else (right, left[2])
            self._note(made, factor * by, offset * by)
        elif name in _COMPARED:
            self._compared.append(made)

    def _read(self, func: Any, name: str, tensor: Any, *args: Any) -> Any:
        term = self._terms.get(id(tensor))
        if term is None and not any(tensor is compared for compared in self._compared):
            return func(tensor, *args)
        if name == "__index__" and term is not None and term[1:] == (1, 0):
            self._indices.append(self._refusal())
            return 0
        raise self._refusal()

    def _refusal(self) -> Exception:
        return self._error(
            "dist.get_rank() in a forward is the device's, and the one program of all devices "
            "can't have Python branch on it, count by it or take it for an index, except that of a "
            "tensor, or of the list that dist.all_gather has filled, to put own rows there. Use "
            "torch.stack(list)[rank], or torch.where. For what one process does alone, such as "
            "printing, ask outside of the forward"
        )

    def _put_in_its_place(self, places: list[Any]) -> None:
        known = [self._filled.get(id(tensor)) for tensor in places]
        first = next((found for found in known if found is not None), None)
        if first is None or len(places) != len(first[1]):
            return
        _, before, gathered = first
        changed = [
            k for k, (now, then) in enumerate(zip(places, before, strict=True)) if now is not then
        ]
        if len(changed) != 1 or not isinstance(own := places[changed[0]], torch.Tensor):
            return
        if changed == [0] and self._indices:
            self._indices.pop()
            rank = self._make()
            for place, tensor in enumerate(before):
                places[place] = torch.where(rank == place, own, tensor)
        elif own is gathered:
            raise self._error(
                f"every device puts its own rows in place {changed[0]} of what dist.all_gather has "
                "gathered: a rank that was asked outside of the forward is the host's. Ask "
                "dist.get_rank() in the forward"
            )

    def _rows(self, tensor: Any, index: Any) -> torch.Tensor | None:
        """The places of dim 0 that an index by the rank names, `[length]`; None for another."""
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, torch.Tensor):
            return first.reshape(1) if id(first) in self._terms else None
        if not isinstance(first, slice) or first.step not in (None, 1):
            return None
        start = self._term(0 if first.start is None else first.start)
        stop = self._term(first.stop)
        if not start or not stop or not start[1] or start[1] != stop[1]:
            return None
        begin: Any = first.start
        return torch.arange(stop[2] - start[2], device=begin.device) + begin

    def _at(self, name: str, rows: torch.Tensor, tensor: Any, index: Any, *value: Any) -> Any:
        rest = index[1:] if isinstance(index, tuple) else ()
        first = index[0] if isinstance(index, tuple) else index
        if name == "__getitem__":
            found = tensor.index_select(0, rows)
            return found[(slice(None) if isinstance(first, slice) else 0, *rest)]
        if rest:
            raise self._refusal()
        (own,) = value
        own = torch.as_tensor(own, dtype=tensor.dtype, device=tensor.device)
        shape = (len(rows), *tensor.shape[1:])
        return tensor.index_copy_(0, rows, own.expand(shape))


def _on(like: torch.Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": like.device} | kwargs
