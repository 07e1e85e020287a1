"""`model.generate` for a module that an engine trains.

Each token makes the text longer, and on the devices each new shape needs a new program, which takes
seconds to minutes to compile. So a copy of the module generates on the host's CPU.
"""

import copy
import logging
import sys
import weakref
from typing import Any

import torch
from torch import nn

from spmdzero._logging import is_new
from spmdzero.backend import arrays
from spmdzero.integrations._replaced import in_place_of

logger = logging.getLogger("spmdzero")
_trained: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def generate_on_host(module: nn.Module) -> None:
    """Makes `module` and its submodules generate on the host."""
    _trained.update(module.modules())
    mixin = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)

    @in_place_of(mixin, "generate")
    def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _trained or not any(map(arrays.is_mine, self.parameters())):
            return original(self, *args, **kwargs)
        if is_new(("generate", type(self))):
            logger.warning(
                "%s.generate runs on this host's CPU, with a copy of the weights of now: on the "
                "devices each length of the text would be a program to compile",
                type(self).__name__,
            )
        return original(host_copy(self), *args, **kwargs)


def host_copy(module: nn.Module) -> nn.Module:
    """A copy of `module` with its present values on the CPU, tied as there; of no engine."""
    copies: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        value = tensor.detach().cpu()
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = value
    with torch.no_grad():
        return copy.deepcopy(module, copies)
