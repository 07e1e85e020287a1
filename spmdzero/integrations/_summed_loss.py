"""The sum of the losses between two log lines, which are read when the sum is read."""

from collections.abc import Callable
from typing import Any

import torch

from spmdzero.integrations._deferred import DeferredTensor

_aten = torch.ops.aten


class SummedLoss(DeferredTensor):
    """A sum of deferred losses that is computed on the CPU, at the first read.

    On the devices it would be a part of the next step's program, which would then differ after each
    log line.

    Args:
        share: called when a loss is added; returns the fraction of the sum so far that replaces the
            loss if it is not finite, or None to add it anyway.
        before_read: called before losses are read.
    """

    _share: Callable[[], float | None]
    _before_read: Callable[[], None]
    _unread: list[tuple[DeferredTensor, float | None]]

    @staticmethod
    def __new__(  # pyrefly: ignore[bad-override]
        cls, share: Callable[[], float | None], before_read: Callable[[], None]
    ) -> Any:
        """Makes an empty sum."""
        return DeferredTensor.__new__(cls, torch.zeros(()), computes=False)

    def __init__(self, share: Callable[[], float | None], before_read: Callable[[], None]) -> None:
        self._share, self._before_read, self._unread = share, before_read, []

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keeps added losses for a later read."""
        if func is _aten.add_.Tensor and isinstance(args[0], cls) and not kwargs:
            total, loss = args
            if isinstance(loss, DeferredTensor) and loss is not total:
                total._unread.append((loss, total._share()))
                return total
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read(self) -> torch.Tensor:
        """The sum, on the CPU."""
        unread, self._unread = self._unread, []
        if unread:
            self._before_read()
        for loss, share in unread:
            value = loss.read()
            if share is not None and not torch.isfinite(value):
                value = self._value * share
            self._value += value
        return self._value
