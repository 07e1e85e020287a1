"""torch_xla's ways from the devices to the host, watched in torch's dispatcher."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

# It holds the kernels below for as long as the process lives.
_watched = torch.library.Library("aten", "IMPL")


def watch_moves(read: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Asks `read` at each move of a tensor from the devices to the host.

    Args:
        read: its value on the CPU, None for what torch_xla itself reads.
    """

    def to_copy(keys: Any, source: torch.Tensor, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if source.device.type == "xla" and device is not None and device.type == "cpu":
            value = read(source)
            if value is not None:
                return torch.ops.aten._to_copy.default(value, **options)
        return kernels["_to_copy"].call_boxed(keys, source, **options)

    def to_cpu(keys: Any, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        values = [read(s) if s.device.type == "xla" else None for s in sources]
        if all(value is None for value in values):
            return kernels["_to_cpu"].call_boxed(keys, sources)
        return [s.cpu() if v is None else v for s, v in zip(sources, values, strict=True)]

    def copy_(
        keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if target.device.type == "cpu" and source.device.type == "xla":
            value = read(source)
            if value is not None:
                return target.copy_(value)
        return kernels["copy_"].call_boxed(keys, target, source, non_blocking)

    watches = {"_to_copy": to_copy, "_to_cpu": to_cpu, "copy_": copy_}
    kernels = {name: torch.library.get_kernel(f"aten::{name}", "XLA") for name in watches}
    with warnings.catch_warnings():
        # torch warns that there was a kernel, which these call.
        warnings.simplefilter("ignore")
        for name, watch in watches.items():
            _watched.impl(name, watch, "XLA", with_keyset=True)
