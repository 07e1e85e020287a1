"""`deepspeed.checkpoint.utils`."""

from typing import Any

import torch

from spmdzero.compat import refusals


def clone_tensors_for_torch_save(
    item: Any,
    device: torch.device | str = torch.device("cpu"),  # noqa: B008 (DeepSpeed's)
) -> Any:
    """A copy of nested lists, tuples and dicts whose tensors are clones on `device`.

    A clone's storage holds its own elements only, so files stay small.
    """
    if isinstance(item, torch.Tensor):
        target = torch.device(device)
        return item.detach().clone() if item.device == target else item.detach().to(target)
    if isinstance(item, list | tuple):
        return type(item)([clone_tensors_for_torch_save(value, device) for value in item])
    if isinstance(item, dict):
        return type(item)(
            {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
        )
    return item


def __getattr__(name: str) -> Any:
    return refusals.attribute("checkpoint.utils", name)
