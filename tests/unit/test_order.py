"""An order between two values, expressed in operations."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmdzero.backend.forms._order import after

pytestmark = pytest.mark.backends("any")


class _Made(TorchDispatchMode):
    """Takes note of the shapes of all results that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.shapes.append(tuple(made.shape))
        return made


def test_a_value_is_waited_for_by_one_element_of_it_wherever_its_elements_lie() -> None:
    tensor, other = torch.randn(3), torch.randn(4, 5, 6).transpose(0, 2)
    with _Made() as made:
        same = after(tensor, other)
    assert torch.equal(same, tensor)
    assert set(made.shapes) == {(), (3,)}
