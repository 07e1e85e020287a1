"""Takes apart what blocks take and return, and refuses blocks that can't become a loop."""

from typing import Any

import torch

from spmdzero.backend.forms._tree import Skeleton, UnknownContentError
from spmdzero.backend.pure import ImpureError


class NotALoopError(ImpureError):
    """A block can't be the body of a loop; the text is a clause that says why."""


def taken_apart(tree: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """Returns what a block takes or returns, without its tensors, and the tensors.

    Raises:
        NotALoopError: a part of `tree` may change from call to call.
    """
    try:
        return Skeleton.of(tree)
    except UnknownContentError as error:
        raise NotALoopError(f"a block takes or returns {error}") from None
