"""Watches what happens around a backward pass, whether the engine or the user started it."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from spmdzero.backend import (
    Region,
    RegionRules,
    arrays,
    hands_over,
    map_tensors,
    nodes_behind,
    refuse_graph,
)
from spmdzero.engine._loss import summed_by
from spmdzero.errors import SpmdZeroUsageError

_running = threading.local()
_watches: "weakref.WeakSet[BackwardWatch]" = weakref.WeakSet()
_numbers = itertools.count()
_FORWARD_OF = "spmdzero forward of"
_BATCHES = "spmdzero batches"


class BackwardWatch:
    """Notices a backward pass by the gradient that reaches an output of the forward.

    So `loss.backward()` works as `engine.backward(loss)` does, and a backward that one engine
    starts runs through the module of a second engine (a GAN's generator is trained through its
    discriminator).

    Args:
        region: recomputes checkpointed modules in its own context; None with a global forward.
        accumulation: returns the micro-batches in one step, by which a plain `loss.backward()` is
            divided.
        needs_scale: whether the loss has to be scaled before a backward (fp16).
        note_scaled: called before a backward pass of a loss that is scaled.
        rules: which outputs are batches, and in which dim.
    """

    def __init__(
        self,
        *,
        region: Region | None,
        accumulation: Callable[[], int],
        needs_scale: bool,
        note_scaled: Callable[[], None],
        rules: RegionRules,
    ) -> None:
        self._note_scaled, self._rules = note_scaled, rules
        self._region, self._accumulation, self._needs_scale = region, accumulation, needs_scale
        self._scaled = False
        self._number = next(_numbers)
        _watches.add(self)

    def watch(self, output: Any) -> Any:
        """Hooks the differentiable tensors in the forward's output; returns the output to use."""
        # A subclass of torch's tensors would run Python for each attribute.
        with torch._C.DisableTorchFunctionSubclass():
            return map_tensors(output, self._hook)

    def _hook(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        if self._region is None:
            # One output may be computed from another, such as a loss from logits: the gradient
            # would pass two hooks. An output that leaves a region is already a copy.
            tensor = arrays.fresh(tensor)
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_FORWARD_OF] = self._number
            batches = node.metadata.setdefault(_BATCHES, {})
            # Only a batch leaves the region with a dim, unless an output is declared.
            if self._rules.outputs.get(path, "batch" if tensor.dim() else "mean") == "batch":
                batches[tensor.output_nr] = self._rules.batch_dim
        tensor.register_hook(self._arrived)
        return tensor

    def sum_of_rows(self, loss: torch.Tensor) -> str | None:
        """Calls `summed_by` on the batches that the engine returned."""
        return summed_by(
            loss,
            lambda node: (
                node.metadata[_BATCHES] if node.metadata.get(_FORWARD_OF) == self._number else None
            ),
        )

    @staticmethod
    def keep_in_thread() -> None:
        """Makes backward passes run in this thread from now on, also those inside of a forward.

        autograd's own threads may let go of a last pending tensor only after the step's program was
        cut; the program then has one more output and is compiled again. And autograd has no thread
        for torch_xla's devices if a backward pass ran before torch_xla was imported.
        """
        torch.autograd.set_multithreading_enabled(False)

    def expect_scaled(self) -> None:
        """Notes that the next plain backward starts from a loss that `engine.scale` returned."""
        self._scaled = True
        self._note_scaled()

    @contextlib.contextmanager
    def by_engine(self, loss: torch.Tensor) -> Iterator[None]:
        """Surrounds a backward pass that `engine.backward` starts on an already scaled loss.

        An engine takes part if `loss` comes from its latest forward. One that only waits for a
        backward pass, or is unreferenced but not collected by Python yet, doesn't.
        """
        waiting = [w for w in _watches if w._region is not None and w._region.awaits_backward]
        wanted = {watch._number for watch in waiting} - {self._number}
        behind = _forwards_behind(loss, wanted) if wanted else set()
        others = sorted((w for w in waiting if w._number in behind), key=lambda w: w._number)
        for watch in _watches:
            # The pass may run through a module of another engine that was called without its
            # engine.
            watch._note_scaled()
        with contextlib.ExitStack() as regions:
            for watch in [*others, self]:
                if watch._region is not None:
                    regions.enter_context(watch._region.backward())
            _running.engine = True
            regions.callback(setattr, _running, "engine", False)
            yield

    @contextlib.contextmanager
    def by_hooks(self) -> Iterator[None]:
        """Surrounds a backward pass that `engine.backward` starts, whose hooks run forwards.

        What these hand back is divided and scaled already, as the gradient that the hooks are
        called with is.
        """
        for watch in _watches:
            watch._note_scaled()
        with contextlib.ExitStack() as ends:
            _running.hooks = _running.engine = True
            ends.callback(setattr, _running, "engine", False)
            ends.callback(setattr, _running, "hooks", False)
            yield

    def _arrived(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        # A folded forward is one node, and this hook is called for each of its outputs, some of
        # which have no gradient.
        by_hooks = getattr(_running, "hooks", False)
        if grad is None or (getattr(_running, "engine", False) and not by_hooks):
            return grad
        if self._region is not None and self._region.recomputes:
            raise SpmdZeroUsageError(
                "gradient caching with activation checkpointing: what is recomputed would run "
                "outside of the replica region. Leave checkpointing out; smaller parts "
                "(mini_batch_size) save memory too"
                if by_hooks
                else "loss.backward() with activation checkpointing: what is recomputed would run "
                "outside of the replica region. Call engine.backward(loss)"
            )
        if self._region is not None and self._region.collects:
            raise SpmdZeroUsageError(
                "loss.backward() through a forward that calls torch.distributed: what its backward "
                "asks there would be answered for hosts, outside of the replica region. Call "
                "engine.backward(loss)"
            )
        if hands_over():
            # torch.autograd.grad asks for these numbers, which has nothing to do with a step.
            return grad
        if by_hooks:
            return grad
        if torch.is_grad_enabled():
            refuse_graph()
        if self._needs_scale and not self._scaled:
            raise SpmdZeroUsageError(
                "fp16 scales its loss, and this backward started from one that is not scaled: "
                "call engine.backward(loss), or engine.scale(loss).backward()"
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._finished)
        steps = self._accumulation()
        return grad if steps == 1 else grad / steps

    def _finished(self) -> None:
        self._scaled = False


def _forwards_behind(loss: torch.Tensor, wanted: set[int]) -> set[int]:
    """The numbers in `wanted` of watches that saw an output that `loss` comes from."""
    found: set[int] = set()
    for node in nodes_behind(loss, ends=lambda _: found == wanted):
        number = node.metadata.get(_FORWARD_OF)
        if number in wanted:
            found.add(number)
    return found
