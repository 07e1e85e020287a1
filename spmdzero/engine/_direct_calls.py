"""Watches calls of an engine's module that don't go through the engine."""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmdzero._user_line import user_line
from spmdzero.backend import arrays, current, device_types, found, hands_over, map_tensors
from spmdzero.engine._backward import BackwardWatch
from spmdzero.engine._module_hooks import ModuleHook
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.state._training import Training

logger = logging.getLogger("spmdzero")
# From so many forms of inputs on, a script computes of ever longer ones, as it generates text.
_FORMS = 3


class DirectCalls(ModuleHook):
    """Hooks of an engine's module, whose forward should run in the replica region.

    Outside of the region the numbers are right, but each device computes all rows; a warning says
    so once. Under `torch.no_grad` or in evaluation mode people call the module to generate and
    measure, and there is no warning, but a line where calls have inputs of ever new shapes: each
    operation of each shape is compiled by itself. On a copy or a pickle of the module, which
    belongs to no engine, the hooks do nothing.

    Args:
        training: the engine's.
        notes_forms: whether that line is said: a client's model generates on the host, and what it
            evaluates has shapes of its own.
    """

    def __init__(self, training: Training | None = None, *, notes_forms: bool = True) -> None:
        # A hook of the module must not keep an engine alive.
        self._training = weakref.ref(training) if training is not None else None
        self._said, self._notes_forms = False, notes_forms
        self._forms: set[tuple[torch.Size, ...]] = set()

    def watch(self, module: nn.Module, *, backwards: bool) -> None:
        """Follows calls of `module`.

        Args:
            module: the engine's module.
            backwards: whether to note where in the user's code backward passes of the calls begin.
        """
        self.take_the_place_of_outlived(module)
        module.register_forward_pre_hook(self, with_kwargs=True)
        if backwards:
            module.register_forward_hook(self.note_backwards)

    @property
    def outlived(self) -> bool:
        """Whether the engine of this hook is gone."""
        return self._training is None or self._training() is None

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Warns of a call on the wrong path, and starts pending work of earlier calls."""
        training = self._of_direct_call(module)
        parameter = next(module.parameters(), None)
        if training is None or parameter is None or not arrays.is_mine(parameter):
            # A module that was moved off the devices is a plain torch module.
            return
        if torch.is_inference_mode_enabled() and not current().views_in_inference_mode:
            raise SpmdZeroRuntimeError(
                f"{user_line()}: {type(module).__name__} is called without its engine in "
                f"torch.inference_mode(), where {current().name} can't take a view of a parameter. "
                "Call it in torch.no_grad(), or call the engine, engine(...)"
            )
        if "cpu" in device_types((args, dict(kwargs))):
            self._say(
                module,
                "with a tensor on the CPU, where its parameters are not. Call the engine, "
                "engine(...), which takes the batch from the CPU, or move it: x.to(engine.device)",
            )
        elif not torch.is_grad_enabled():
            training.start_unread()
            self._note_form(module, (args, dict(kwargs)))
        elif module.training:
            self.say_gradients(module)

    def _note_form(self, module: nn.Module, inputs: Any) -> None:
        """Says once that inputs of ever new shapes are compiled for."""
        if not self._notes_forms or len(self._forms) >= _FORMS:
            return
        self._forms.add(tuple([tensor.shape for tensor in found(inputs, torch.Tensor)]))
        if len(self._forms) == _FORMS:
            logger.warning(
                "%s is called without its engine with inputs of a third shape. Each operation of "
                "each shape is compiled, which takes seconds: for generate(), for each length of "
                "the text. Pad the inputs to one shape; to generate, take a copy on the host: "
                "text = type(model)(model.config); text.load_state_dict({name: tensor.cpu() for "
                "name, tensor in engine.module.state_dict().items()})",
                type(module).__name__,
            )

    def note_backwards(self, module: nn.Module, args: Any, output: Any) -> None:
        """Makes backward passes through `output` note the user's line that started them."""
        training = self._of_direct_call(module)
        if training is None or not torch.is_grad_enabled():
            return
        noted = weakref.ref(training)

        def note(grad: torch.Tensor) -> None:
            of = noted()
            # torch.autograd.grad leaves no gradient for a step.
            if of is not None and not hands_over():
                of.current.pass_direct_backward(user_line(otherwise="in a backward pass"))

        def hook(_: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor.register_hook(note)
            return tensor

        # In a thread of autograd no line of the user's code is running.
        BackwardWatch.keep_in_thread()
        map_tensors(output, hook)

    def say_gradients(self, module: nn.Module) -> None:
        """Warns that gradients come from outside of the region."""
        self._say(
            module,
            "to train: outside of the replica region each device computes all rows, and a batch "
            "norm sees all of them. The gradients are used, but nothing is gained by the devices. "
            "Call the engine, engine(...), in its place",
        )

    def _of_direct_call(self, module: nn.Module) -> Training | None:
        """The engine's training if its `module` is called without the engine, else None."""
        training = self._training() if self._training is not None else None
        if current().in_region() or training is None or training.module is not module:
            return None
        return training

    def _say(self, module: nn.Module, what: str) -> None:
        if not self._said:
            self._said = True
            name = type(module).__name__
            logger.warning("%s, or a part of it, is called without its engine %s", name, what)

    def __reduce__(self) -> Any:
        return DirectCalls, ()
