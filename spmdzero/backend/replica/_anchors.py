"""Values of a block's forward that its backward reuses instead of computing them again."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _autograd as _C

from spmdzero._dispatch_mode import DispatchMode
from spmdzero.backend.replica import _keepers
from spmdzero.backend.replica._products import ANCHORS


class Anchors(DispatchMode):
    """Passes each anchor's value to `keep`, and puts its result in the value's place.

    Args:
        keep: called in the order of the forward, with a value and whether it rests in the host's
            memory between forward and backward.

    Attributes:
        active: whether anchors are passed to `keep`.
        input_on_host: whether the block's input rests in the host's memory between forward and
            backward, if backward needs it.
    """

    def __init__(self, keep: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self._keep, self.active, self.input_on_host = keep, True, False

    def __enter__(self) -> "Anchors":
        _keepers.enter(self)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        _keepers.leave()

    def kept(self, value: torch.Tensor, *, on_host: bool = False) -> torch.Tensor:
        """The tensor that takes the place of an anchor's value."""
        return self._keep(value, on_host) if self.active and not is_hooked() else value

    def of_kernel(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that take the place of a kernel's results, which are anchors."""
        # The tensor is also kept elsewhere: without `detach`, autograd's notes on it would live as
        # long.
        return [self.kept(value).detach() for value in values]

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation; an anchor's value goes to `keep`, unless a keeper inside decides."""
        result = func(*args, **kwargs)
        return self.kept(result) if func in ANCHORS and _keepers.is_innermost(self) else result


@contextlib.contextmanager
def no_hooks() -> Iterator[None]:
    """Context in which autograd saves plain tensors, even if checkpointing has set hooks outside.

    Own hooks that do nothing would not suffice: each saved output would keep itself alive.
    """
    hooks = []
    while is_hooked():
        hooks.append(_C._top_saved_tensors_default_hooks(False))
        _C._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _C._push_saved_tensors_default_hooks(pack, unpack)


def is_hooked() -> bool:
    """Whether hooks are set on the tensors that autograd saves."""
    return _C._top_saved_tensors_default_hooks(False) is not None
