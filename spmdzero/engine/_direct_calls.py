"""Says once that a module which an engine trains was called without its engine."""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.backend import arrays, current, device_types
from spmdzero.engine._module_hooks import ModuleHook
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")


class DirectCalls(ModuleHook):
    """A forward pre-hook of an engine's module, whose forward belongs into the replica region.

    Outside of it the numbers are right, but each device computes all rows. Under `torch.no_grad`,
    or in evaluation mode, that is how people generate and measure, and nothing is said. A copy or
    a pickle of the module does nothing: it belongs to no engine.
    """

    def __init__(self, training: Training | None = None) -> None:
        # A hook of the module must not keep an engine alive.
        self._training = weakref.ref(training) if training is not None else None
        self._said = False

    def watch(self, module: nn.Module) -> None:
        """Follows calls of `module`."""
        self.take_the_place_of_outlived(module)
        module.register_forward_pre_hook(self, with_kwargs=True)

    @property
    def outlived(self) -> bool:
        """Whether its engine is gone."""
        return self._training is None or self._training() is None

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Says it where a call is one to warn of."""
        training = self._training() if self._training is not None else None
        if self._said or current().in_region() or training is None or training.module is not module:
            return
        parameter = next(module.parameters(), None)
        if parameter is None or not arrays.is_mine(parameter):
            # It was moved off the devices, for plain torch.
            return
        if "cpu" in device_types((args, dict(kwargs))):
            self._say(
                module,
                "with a tensor on the CPU, where its parameters are not. Call the engine, "
                "engine(...), which takes the batch from the CPU, or move it: x.to(engine.device)",
            )
        elif torch.is_grad_enabled() and module.training:
            self.say_gradients(module)

    def say_gradients(self, module: nn.Module) -> None:
        """Says that gradients come from outside of the region."""
        self._say(
            module,
            "to train: outside of the replica region each device computes all rows, and a batch "
            "norm sees all of them. The gradients are used, but nothing is gained by the devices. "
            "Call the engine, engine(...), in its place",
        )

    def _say(self, module: nn.Module, what: str) -> None:
        if not self._said:
            self._said = True
            name = type(module).__name__
            logger.warning("%s, or a part of it, is called without its engine %s", name, what)

    def __reduce__(self) -> Any:
        return DirectCalls, ()
