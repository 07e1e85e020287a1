"""Notes of what a tensor's values are known to be, which copies of the values have, too."""

from typing import Any

import torch

# An attribute, since what runs again in a backward pass is in no context of its forward.
_SAID = "_spmdzero_said"


def say(tensor: torch.Tensor, what: Any) -> None:
    """Has `said_of` return `what`, until `tensor` is written."""
    setattr(tensor, _SAID, (what, tensor._version))


def said_of(tensor: torch.Tensor) -> Any:
    """Gives what was said of `tensor` since it was written; None if nothing was."""
    what, version = getattr(tensor, _SAID, (None, None))
    return what if version == tensor._version else None


def unsay(tensor: torch.Tensor) -> None:
    """Has `said_of` return None: the tensor gets other values, and may get their version."""
    vars(tensor).pop(_SAID, None)


def as_said_of(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Returns `copied`, which has the values of `tensor`, and says of it what is said of that."""
    what = said_of(tensor)
    if what is not None:
        say(copied, what)
    return copied
