"""The gradients that autograd itself keeps, which the engine takes over."""

from collections.abc import Callable
from typing import Any

import torch

_grad: Any = torch.Tensor.grad

# Called for each parameter, twice a step: a Python function around it costs three times as much.
autograd_grad: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
"""What autograd itself summed into a parameter, whatever its class calls `grad`."""

set_autograd_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__
"""Sets what `autograd_grad` returns."""
