"""A module that a client calls by itself, as transformers' Trainer does to evaluate."""

from typing import Any

from torch import nn

from spmdzero.backend import Batch, arrays, current, device_types, map_tensors, runtime
from spmdzero.data._inputs import InputPlacer
from spmdzero.engine._module_hooks import ModuleHook
from spmdzero.integrations._deferred import as_input, defer


class CallsFromHost(ModuleHook):
    """Hooks of a module on the devices: inputs on the CPU are uploaded, outputs are deferred.

    The call runs in global space, each device on its rows as far as the compiler sees that it can:
    a mean is one over all rows, as on one device. Of several hosts each computes of its own rows
    what one rank would, of any number that all of them have. A copy or a pickle of the module does
    nothing.
    """

    def __init__(self, placer: InputPlacer | None = None) -> None:
        self._placer = placer
        self._uploaded: list[bool] = []

    def watch(self, module: nn.Module) -> None:
        """Follows calls of `module`."""
        self.take_the_place_of_outlived(module)
        module.register_forward_pre_hook(self.upload, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.defer, always_call=True)

    @property
    def outlived(self) -> bool:
        """True: a new one does what it did, of an engine that lives too."""
        return True

    def upload(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a forward."""
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
        placed = self._placer(args, kwargs, training=False)
        return map_tensors(placed, lambda _, t: t.tensor if isinstance(t, Batch) else t)

    def defer(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After a forward, also one that raised."""
        return defer(output) if self._uploaded.pop() else output

    def __reduce__(self) -> Any:
        return CallsFromHost, ()
