"""Direct calls of an engine's module by a client, as transformers' Trainer makes to evaluate."""

from typing import Any

from torch import nn

from spmdzero.backend import Batch, arrays, current, device_types, map_tensors, runtime
from spmdzero.data._inputs import InputPlacer
from spmdzero.engine._module_hooks import ModuleHook
from spmdzero.integrations._deferred import as_input, defer
from spmdzero.integrations._pictures import with_positions


class CallsFromHost(ModuleHook):
    """Hooks of a module on the devices: inputs on the CPU are uploaded, outputs are deferred.

    The call runs in global space, where the compiler splits the rows over the devices if it can: a
    mean is taken over all rows, as on one device. Each of several hosts computes on its own rows
    what one rank would; their number must be the same on all hosts. On a copy or a pickle of the
    module the hooks do nothing.
    """

    def __init__(self, placer: InputPlacer | None = None) -> None:
        self._placer = placer
        self._uploaded: list[bool] = []

    def watch(self, module: nn.Module) -> None:
        """Hooks calls of `module`."""
        self.take_the_place_of_outlived(module)
        module.register_forward_pre_hook(self.upload, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.defer, always_call=True)

    @property
    def outlived(self) -> bool:
        """True: a new hook does the same, even if the old one's engine is alive."""
        return True

    def upload(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Uploads inputs on the CPU, before a forward."""
        self._uploaded.append(
            self._placer is not None
            and not current().in_region()
            and device_types((args, kwargs)) == {"cpu"}
            # The user may have moved the module to the CPU, for plain torch.
            and any(map(arrays.is_mine, module.parameters()))
        )
        if not self._uploaded[-1] or self._placer is None:
            return None
        args, kwargs = map_tensors((args, kwargs), lambda _, tensor: as_input(tensor))
        if self._placer.across is not None:
            device = runtime.device()
            return map_tensors((args, kwargs), lambda _, tensor: tensor.to(device))
        kwargs = with_positions(module, kwargs)
        placed = self._placer(args, kwargs, training=False)
        return map_tensors(placed, lambda _, t: t.tensor if isinstance(t, Batch) else t)

    def defer(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Defers the outputs after a forward, also after one that raised."""
        return defer(output) if self._uploaded.pop() else output

    def __reduce__(self) -> Any:
        return CallsFromHost, ()
