"""torch_xla's ways from the devices to the host, watched in torch's dispatcher."""

from collections.abc import Callable
from typing import Any

import torch

from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


def watch_copies_to_host(read: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Calls `read` for each move of a tensor from the devices to the host.

    Args:
        read: returns the value on the CPU, or None if torch_xla itself shall read it.
    """

    def to_copy(kernel: Kernel) -> Kernel:
        def watched(keys: Any, source: torch.Tensor, **options: Any) -> torch.Tensor:
            device = options.get("device")
            if source.device.type == "xla" and device is not None and device.type == "cpu":
                value = read(source)
                if value is not None:
                    return torch.ops.aten._to_copy.default(value, **options)
            return kernel(keys, source, **options)

        return watched

    def to_cpu(kernel: Kernel) -> Kernel:
        def watched(keys: Any, sources: list[torch.Tensor]) -> list[torch.Tensor]:
            values = [read(s) if s.device.type == "xla" else None for s in sources]
            if all(value is None for value in values):
                return kernel(keys, sources)
            return [s.cpu() if v is None else v for s, v in zip(sources, values, strict=True)]

        return watched

    def copy_(kernel: Kernel) -> Kernel:
        def watched(
            keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
        ) -> torch.Tensor:
            if target.device.type == "cpu" and source.device.type == "xla":
                value = read(source)
                if value is not None:
                    return target.copy_(value)
            return kernel(keys, target, source, non_blocking)

        return watched

    for name, watch in {"_to_copy": to_copy, "_to_cpu": to_cpu, "copy_": copy_}.items():
        wrap_kernel(name, watch)
