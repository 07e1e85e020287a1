"""A block's arguments and results as tensors and a hashable form, by which calls are compared."""

from typing import Any

import torch

from spmdzero.backend.replica._refused import NotALoopError

_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


def flatten(tree: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors in `tree`, and a hashable form of the rest.

    Raises:
        NotALoopError: a part of `tree` is neither, and may change from call to call.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _form(tree, tensors)


def _form(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return torch.Tensor
    if isinstance(tree, _VALUES):
        return type(tree), tree
    if type(tree) in (list, tuple):
        return type(tree), tuple(_form(item, tensors) for item in tree)
    if type(tree) is dict:
        return dict, tuple((key, _form(item, tensors)) for key, item in tree.items())
    raise NotALoopError(
        f"a block takes or returns a {type(tree).__name__}, which each block may change"
    )


def unflatten(form: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree of this form with these tensors, which are removed from the list's start."""
    if form is torch.Tensor:
        return tensors.pop(0)
    kind, content = form
    if kind in (list, tuple):
        return kind(unflatten(item, tensors) for item in content)
    if kind is dict:
        return {key: unflatten(item, tensors) for key, item in content}
    return content
