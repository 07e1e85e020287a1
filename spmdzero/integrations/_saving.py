"""`save_pretrained` of a model whose weights are on the devices."""

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.backend import arrays

_CLASSES = (("transformers.modeling_utils", "PreTrainedModel"), ("peft.peft_model", "PeftModel"))
_STATE = "state_dict"


def save_from_host() -> None:
    """Has `save_pretrained` of transformers and peft, where they are imported, take weights there.

    Both look for tied weights by addresses in memory, which a tensor on the devices has not. Their
    argument `state_dict` is what they save instead.
    """
    for path, name in _CLASSES:
        found = getattr(sys.modules.get(path), name, None)
        if found is not None and not hasattr(found.save_pretrained, "spmdzero"):
            found.save_pretrained = _from_host(found.save_pretrained)


def _from_host(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind(self, *args, **kwargs).arguments, **kwargs}.get(_STATE)
        if given is None and any(arrays.is_mine(p) for p in self.parameters()):
            kwargs[_STATE] = host_state_dict(self)
        return original(self, *args, **kwargs)

    save_pretrained.spmdzero = True  # pyrefly: ignore[missing-attribute]
    return save_pretrained


def host_state_dict(module: nn.Module) -> Mapping[str, Any]:
    """`module.state_dict()` on the CPU, where tied weights are one tensor."""
    copies: dict[int, torch.Tensor] = {}

    def on_host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().cpu()
        return copies[id(value)]

    # The parameters themselves: what is detached of a tied one are different tensors.
    return {name: on_host(value) for name, value in module.state_dict(keep_vars=True).items()}
