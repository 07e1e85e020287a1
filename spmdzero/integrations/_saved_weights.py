"""`state_dict()` of a client's module, which the client writes to files as it is."""

import sys
from typing import Any

import torch
from torch import nn

from spmdzero.backend import arrays
from spmdzero.engine._module_hooks import ModuleHook
from spmdzero.integrations._replaced import in_place_of

# What transformers writes into a config by its name.
_NAMED = ("dtype",)


class WeightsOnHost(ModuleHook):
    """A hook of modules that moves the values of their `state_dict()` to the CPU.

    Files of tensors on the devices can only be read where their backend is, and `save_pretrained`
    can't write them, as it looks for shared memory. Shared values stay shared. On a copy or a
    pickle of the module the hook does nothing.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        if module is None:
            return
        self.take_the_place_of_outlived(module)
        for part in module.modules():
            # All parts have this one hook: a part's call comes before that of the whole.
            part.register_state_dict_post_hook(self)

    @property
    def outlived(self) -> bool:
        """True: a new hook does the same."""
        return True

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        """Copies values on the devices to the CPU, unless the state dict has the parameters."""
        copies: dict[int, torch.Tensor] = {}
        within = prefix.removesuffix(".")
        named = [*module.named_parameters(within, remove_duplicate=False)]
        for name, tensor in [*named, *module.named_buffers(within, remove_duplicate=False)]:
            value = state.get(name)
            if value is None or value is tensor:
                continue
            # The call for a part has already copied the value, once for each name.
            if id(tensor) not in copies:
                copies[id(tensor)] = value.cpu() if arrays.is_mine(value) else value
            state[name] = copies[id(tensor)]

    def __reduce__(self) -> Any:
        return WeightsOnHost, ()


def leave_configs_as_they_are() -> None:
    """Has transformers' `save_pretrained` leave a model's config as it was.

    It writes the dtype's name into it, for the file. A config that has changed is a model that may
    compute something else, so that the first save would have its programs compiled again.
    """
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)

    @in_place_of(models, "save_pretrained")
    def save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        told = vars(self.config)
        before = {name: told[name] for name in _NAMED if name in told}
        try:
            return original(self, *args, **kwargs)
        finally:
            told.update(before)
