"""Python's text of a tensor."""

from collections.abc import Callable
from typing import Any

import torch

from spmdzero._replaced import in_place_of

_BECAUSE = "torch reads a tensor on the devices for its text, past the places that know it is read"


def watch_text(shown: Callable[[torch.Tensor, Callable[..., str]], str | None]) -> None:
    """Takes the text of tensors on the devices from `shown`, or torch's where that returns None."""
    own_repr = torch._tensor_str._str

    @in_place_of(torch._tensor_str, "_str", because=_BECAUSE)
    def text(own: Callable[..., str], self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        found = None
        if self.device.type == "xla" and tensor_contents is None:
            found = shown(self, own)
        return own(self, tensor_contents=tensor_contents) if found is None else found

    @in_place_of(torch.Tensor, "__format__", because=_BECAUSE)
    def formatted(own: Callable[..., str], self: torch.Tensor, format_spec: str) -> str:
        if self.device.type == "xla" and not format_spec:
            found = shown(self, own_repr)
            if found is not None:
                return found
        return own(self, format_spec)
