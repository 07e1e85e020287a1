"""Carries device tensors through the host, where the process group works, and back."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from spmdzero.backend import current
from spmdzero.backend.hosts import processes


class Done:
    """The handle of a collective that has finished."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """True, as the collective has finished."""
        return True


@contextlib.contextmanager
def on_host(*, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yields CPU copies of `read` and of `written`; copies the latter back afterwards.

    A tensor in both lists has one copy. CPU tensors are not copied, so that gloo fills the user's
    own view.
    """
    copies: dict[int, torch.Tensor] = {}

    def host(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        return copies.setdefault(id(tensor), tensor.detach().cpu())

    yield [host(tensor) for tensor in read], [host(tensor) for tensor in written]
    with torch.no_grad():
        for tensor in written:
            if id(tensor) in copies:
                tensor.copy_(copies[id(tensor)])


def all_on_cpu(*tensors: torch.Tensor) -> bool:
    """Whether gloo can work on the tensors themselves, and so in the background."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def run_on_host(
    call: Callable[[list[torch.Tensor], list[torch.Tensor], bool], Any],
    *,
    read: Sequence[torch.Tensor] = (),
    written: Sequence[torch.Tensor] = (),
    async_op: bool = False,
) -> Any:
    """Runs `call(read, written, asynchronous)` on CPU tensors; returns a handle if `async_op`.

    A device tensor is copied through the host, and its handle is already finished.
    """
    processes.join()
    if current().in_region():
        # In a forward torch's collectives are those of the devices, and nothing is read.
        return call(list(read), list(written), False) or Done()
    if async_op and all_on_cpu(*read, *written):
        return call(list(read), list(written), True)
    with on_host(read=read, written=written) as (sources, targets):
        call(sources, targets, False)
    return Done() if async_op else None
