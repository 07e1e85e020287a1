"""Prepares what a client writes to files of a module: its `state_dict()`, and its config."""

from typing import Any

import torch
from torch import nn

from spmdzero._after_import import after_import
from spmdzero.backend import arrays
from spmdzero.engine._module_hooks import ModuleHook, is_trained
from spmdzero.integrations._replaced import in_place_of

# What `save_pretrained` writes into a config before it writes the file.
_ONLY_IN_FILES = ("dtype", "architectures")


def follow_imports() -> None:
    """Has transformers save a model that an engine trains without a change of its config."""
    after_import("transformers.modeling_utils", _keep_configs)


def _keep_configs(modeling: Any) -> None:
    @in_place_of(modeling.PreTrainedModel, "save_pretrained")
    def save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # With a dtype by its name, where it was torch's, the config is another one, for which
        # each program of the engine would be compiled again.
        config = vars(self.config)
        before = {name: config[name] for name in _ONLY_IN_FILES if name in config}
        try:
            return original(self, *args, **kwargs)
        finally:
            if is_trained(self):
                config.update(before)


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
