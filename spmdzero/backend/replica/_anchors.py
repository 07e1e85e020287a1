"""Values of a block's forward that its backward reuses instead of computing them again."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _autograd as _C

from spmdzero._dispatch_mode import DispatchMode
from spmdzero.backend.replica._products import PRODUCTS

# All other operations are cheap beside these: elementwise, or a sum over a row. XLA would compute
# them again in a fusion of the backward anyway, unless memory is plenty.
ANCHORS = PRODUCTS


class Anchors(DispatchMode):
    """Passes each anchor's value to `keep`, and puts its result in the value's place.

    Args:
        keep: called in the order of the forward.

    Attributes:
        active: whether anchors are passed to `keep`.
    """

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._keep, self.active = keep, True

    def __enter__(self) -> "Anchors":
        _entered.append(self)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        _entered.pop()

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor that takes the place of an anchor's value."""
        return self._keep(value) if self.active and not is_hooked() else value

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation; an anchor's value goes to `keep`."""
        result = func(*args, **kwargs)
        return self.kept(result) if func in ANCHORS else result


_entered: list[Anchors] = []


def kept(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that replace values of no torch operation, such as those of a kernel."""
    if not _entered:
        return values
    # The tensor is also kept elsewhere: without `detach`, autograd's notes on it would live as
    # long.
    return [_entered[-1].kept(value).detach() for value in values]


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
