"""Labels on the CPU, for outputs on the devices."""

import functools
from typing import Any

import torch

from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


@functools.cache
def move_labels() -> None:
    """Makes losses of classes move labels to the devices, as the JAX backend does.

    torch_xla fails with "Expected XLA tensor", without a line of the user's.
    """

    def moving(kernel: Kernel) -> Kernel:
        def moved(keys: Any, *args: Any) -> Any:
            tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
            device = next(t.device for t in tensors if t.device.type == "xla")
            return kernel(keys, *(a.to(device) if isinstance(a, torch.Tensor) else a for a in args))

        return moved

    for name in ("nll_loss", "nll_loss2d"):
        wrap_kernel(f"{name}_forward", moving)
        wrap_kernel(f"{name}_backward", moving)
