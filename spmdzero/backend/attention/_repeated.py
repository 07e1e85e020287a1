"""Keys and values before a model repeated their heads for groups of queries."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_EXPAND = torch.Tensor.expand
_RESHAPE = (torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten)
_INTERLEAVE = (torch.Tensor.repeat_interleave, torch.repeat_interleave)
_HEADS = 1


class Repeated:
    """Takes note of tensors `[rows, heads, length, width]` whose heads are repeated ones.

    Models repeat by an `expand` of `[rows, heads, 1, length, width]` and a reshape, as
    transformers' `repeat_kv` does, or by `repeat_interleave`. The kernels read each head for all
    of its queries, so they need no repeated ones.
    """

    def __init__(self) -> None:
        self._expanded = WeakTensorKeyDictionary()
        self._before = WeakTensorKeyDictionary()

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, made: Any) -> None:
        """Takes note of what `func` made of its arguments."""
        if func is _EXPAND:
            base = args[0]
            if base.dim() == made.dim() == 5 and _is_of_heads(base.shape, made.shape):
                self._expanded[made] = base
        elif func in _RESHAPE and made.dim() == 4 and args[0] in self._expanded:
            rows, heads, times, *rest = args[0].shape
            if made.shape == (rows, heads * times, *rest):
                self._keep(made, self._expanded[args[0]].squeeze(2))
        elif func in _INTERLEAVE and args[0].dim() == made.dim() == 4:
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
            dim = args[2] if len(args) > 2 else kwargs.get("dim")
            if isinstance(repeats, int) and dim in (_HEADS, _HEADS - 4):
                self._keep(made, args[0])

    def _keep(self, made: torch.Tensor, before: torch.Tensor) -> None:
        self._before[made] = before, _versions(made, before)

    def before(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Key and value as they were before, where both were repeated alike; None otherwise."""
        found = []
        for made in (key, value):
            before, versions = self._before.get(made, (None, ()))
            # What was written in place since is no repeated tensor any more.
            if before is None or versions != _versions(made, before):
                return None
            found.append(before)
        same = found[0].shape[_HEADS] == found[1].shape[_HEADS]
        return (found[0], found[1]) if same else None


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


def _is_of_heads(one: torch.Size, many: torch.Size) -> bool:
    return one[2] == 1 and one[:2] == many[:2] and one[3:] == many[3:]
