"""The engine that a client drives: transformers' Trainer, accelerate, Lightning.

A client believes to be one process with one device, the CPU. It hands over the rows of this
process, and reads numbers whenever it likes.
"""

import inspect
import logging
from typing import Any

import torch

from spmdzero._logging import is_new
from spmdzero.backend import map_tensors, runtime
from spmdzero.engine import Engine
from spmdzero.integrations._deferred import DeferredTensor, defer, undefer
from spmdzero.integrations._direct import CallsFromHost
from spmdzero.integrations._generation import generate_on_host
from spmdzero.integrations._saved_weights import WeightsOnHost
from spmdzero.step._schedule_hold import ScheduleHold

logger = logging.getLogger("spmdzero")
_ITEMS = "num_items_in_batch"


class ClientEngine(Engine):
    """An `Engine` whose outputs are `DeferredTensor`s, for batches of a process.

    Beside the rows of a whole micro-batch it takes any smaller number, as a client's loader ends
    with. Rows that the devices can't share equally go to each device whole.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._training.placer.rows.any_number = True
        self._training.row_counts = frozenset({_ITEMS})
        CallsFromHost(self._training.placer).watch(self.module)
        WeightsOnHost(self.module)
        generate_on_host(self.module)
        optimizer = self._training.optimizer
        if optimizer is not None and optimizer.hold is None:
            # The client moves a schedule of its own on, if any, and may do so without a read too.
            optimizer.hold = hold = ScheduleHold()
            training = self._training
            self.after_step.append(lambda: training.step_applied and hold.advance())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `Engine.forward`, for code on the CPU.

        A loss that transformers sums and divides by `num_items_in_batch`
        (`transformers/loss/loss_utils.py`, `fixed_cross_entropy`) is the sum of one replica's rows
        over all rows' items, and the engine takes the mean over replicas: the divisor is a
        replica's share. A key-value cache would be an output that nobody uses: `use_cache` is
        False unless it is given.
        """
        if kwargs.get(_ITEMS) is not None:
            share = runtime.local_device_count() if are_shared((args, kwargs)) else 1
            # As a tensor: a Python number would be another program at each other value.
            items = torch.as_tensor(kwargs[_ITEMS], dtype=torch.float32, device="cpu")
            kwargs[_ITEMS] = items / share
        if "use_cache" not in kwargs and self._would_cache():
            kwargs["use_cache"] = False
        output = super().forward(*args, **kwargs)
        # In `train_batch` it is the engine that goes on with it.
        return output if self.in_train_batch else defer(output)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """As `Engine.backward`, of a loss computed with what `forward` returned."""
        on_devices = super().backward(undefer(loss), retain_graph, scale_wrt_gas)
        return DeferredTensor(on_devices, computes=True)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """As `Engine.scale`."""
        return super().scale(undefer(loss))

    def deferred_grad_norm(self) -> torch.Tensor | None:
        """What `get_global_grad_norm` says, as a scalar that waits for no step."""
        optimizer = self._training.optimizer
        if optimizer is None or optimizer.grad_norm is None:
            return None
        return DeferredTensor(optimizer.grad_norm.detach(), computes=True)

    def _would_cache(self) -> bool:
        if not getattr(getattr(self.module, "config", None), "use_cache", False):
            return False
        parameters = inspect.signature(self.module.forward).parameters.values()
        takes = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)
        if takes and is_new(("use_cache", type(self.module))):
            logger.info(
                "%s: use_cache=False in the engine's forward, a key-value cache is for generating",
                type(self.module).__name__,
            )
        return takes


def are_shared(inputs: Any) -> bool:
    """Whether the devices can share the rows of the first input that has some."""
    rows: list[int] = []
    map_tensors(inputs, lambda _, t: rows.append(t.shape[0]) or t if t.dim() else t)
    return not rows or rows[0] % runtime.local_device_count() == 0
