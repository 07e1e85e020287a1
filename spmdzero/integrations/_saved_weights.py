"""`state_dict()` of a client's module, which it writes to files as it is."""

from typing import Any

import torch
from torch import nn

from spmdzero.backend import arrays
from spmdzero.engine._module_hooks import ModuleHook


class WeightsOnHost(ModuleHook):
    """A hook of modules: what their `state_dict()` returns is on the CPU.

    Files of tensors on the devices are read where their backend is only, and `save_pretrained`
    can't write them: it looks for what shares memory. Values that are shared stay shared. A copy or
    a pickle of the module does nothing.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        if module is None:
            return
        self.take_the_place_of_outlived(module)
        for part in module.modules():
            # As one hook: a part's is called before that of the whole.
            part.register_state_dict_post_hook(self)

    @property
    def outlived(self) -> bool:
        """True: a new one does what it did."""
        return True

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        """Replaces what is on the devices, unless the parameters themselves were asked for."""
        copies: dict[int, torch.Tensor] = {}
        within = prefix.removesuffix(".")
        named = [*module.named_parameters(within, remove_duplicate=False)]
        for name, tensor in [*named, *module.named_buffers(within, remove_duplicate=False)]:
            value = state.get(name)
            if value is None or value is tensor:
                continue
            # A part's hook has copied it already, for each name by itself.
            if id(tensor) not in copies:
                copies[id(tensor)] = value.cpu() if arrays.is_mine(value) else value
            state[name] = copies[id(tensor)]

    def __reduce__(self) -> Any:
        return WeightsOnHost, ()
