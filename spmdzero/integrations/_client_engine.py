"""The engine that a client drives: transformers' Trainer, accelerate, Lightning.

A client believes that it is one process with one device, the CPU. It passes the rows of this
process, and reads numbers at any time.
"""

import inspect
import logging
from typing import Any, ClassVar

import torch

from spmdzero._logging import is_new
from spmdzero.backend import (
    arrays,
    local_replicas,
    map_tensors,
    nodes_behind,
    packing,
    runtime,
)
from spmdzero.compat.engine import DeepSpeedEngine
from spmdzero.engine._loss import runs_forwards
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._back_from_host import BackFromHost
from spmdzero.integrations._deferred import DeferredTensor, as_input, defer, undefer
from spmdzero.integrations._direct import CallsFromHost
from spmdzero.integrations._generation import generate_on_host
from spmdzero.integrations._pictures import with_pictures
from spmdzero.integrations._saved_weights import WeightsOnHost
from spmdzero.step._schedule_hold import ScheduleHold

logger = logging.getLogger("spmdzero")
_ITEMS = "num_items_in_batch"


class ClientEngine(DeepSpeedEngine):
    """An `Engine` whose outputs are `DeferredTensor`s, for batches of a process.

    It takes the rows of a whole micro-batch or any smaller number, as at the end of a client's
    loader. Rows that the devices can't share equally go to each device whole.
    """

    _rows_of_process: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rows = self._training.placer.rows
        rows.any_number = rows.of_process = True
        arrays.mix_with_cpu()
        if runtime.process_count() > 1 and self._training.mesh.across is None:
            logger.warning(
                "several hosts: an output with rows has those of all hosts, on each. What a client "
                "gathers of it (gather_for_metrics, predict) has each row more than once"
            )
        self._destroyed = False
        self._training.row_counts = frozenset({_ITEMS})
        packing.add(self.module)
        CallsFromHost(self._training.placer).watch(self.module)
        # Number of forwards whose backward is to come.
        self._open_forwards = 0
        WeightsOnHost(self.module)
        self._back_from_host = BackFromHost(self._training)
        generate_on_host(self.module)
        optimizer = self._training.optimizer
        if optimizer is not None and optimizer.hold is None:
            # A client may step its own schedule, and this hold lets it do so without a read.
            optimizer.hold = hold = ScheduleHold()
            training = self._training

            def follow() -> None:
                if training.current.applied:
                    hold.advance()

            self.after_step.append(follow)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `Engine.forward`, for code on the CPU.

        transformers sums the losses of one replica's rows and divides by `num_items_in_batch`, the
        items of all rows (`transformers/loss/loss_utils.py`, `fixed_cross_entropy`); the engine
        takes the mean over replicas. So the divisor becomes a replica's share of the items. A
        key-value cache would be an unused output: `use_cache` is False unless it is given.
        """
        if self._destroyed:
            raise SpmdZeroUsageError(
                f"{type(self.module).__name__}: this engine was destroyed, as "
                "accelerator.free_memory() and a second Trainer.train() do. Make a new Trainer, "
                "or a new Accelerator, with the same model, and prepare it"
            )
        self._back_from_host()
        args, kwargs = map_tensors((args, kwargs), lambda _, tensor: as_input(tensor))
        kwargs = with_pictures(self.module, kwargs, replicas=local_replicas(self.mesh.spec))
        args, kwargs = self._with_a_share(args, kwargs)
        if "use_cache" not in kwargs and self._would_cache():
            kwargs["use_cache"] = False
        self._open_forwards += torch.is_grad_enabled()
        output = super().forward(*args, **kwargs)
        # In `train_batch` the engine itself uses the output.
        return output if self.in_train_batch else defer(output)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `Engine.save_checkpoint`, also of a module that the client has moved to the CPU."""
        self._back_from_host()
        return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `Engine.load_checkpoint`, as `save_checkpoint` is run."""
        self._back_from_host()
        return super().load_checkpoint(*args, **kwargs)

    def destroy(self) -> None:
        """Runs `Engine.destroy`; a later forward of the client raises."""
        super().destroy()
        self._destroyed = True

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Runs `Engine.backward` on a loss computed from an output of `forward`.

        Raises:
            SpmdZeroUsageError: the loss comes from a different engine, about which accelerate only
                logs a line.
        """
        on_devices = undefer(loss)
        caches = runs_forwards(on_devices)
        if not (self._open_forwards or caches or _comes_from(loss, self.module)):
            raise SpmdZeroUsageError(
                "backward of a loss that this engine's forward had no part in. A loss that was "
                "detached, or computed under torch.no_grad, has no way back to the model. And one "
                "Accelerator drives the first model that it prepared: make another Accelerator() "
                "for another model, and call that one's backward"
            )
        given = on_devices if caches else _on_devices(loss)
        on_devices = super().backward(given, retain_graph, scale_wrt_gas)
        if not retain_graph:
            self._open_forwards = max(self._open_forwards - 1, 0)
        return DeferredTensor(on_devices, computes=True)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Runs `Engine.scale` on a deferred loss."""
        return super().scale(undefer(loss))

    def shares_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a forward of these inputs gives each device its own rows; else each gets all."""
        return self._training.placer.shares(args, kwargs, training=self.module.training)

    def deferred_grad_norm(self) -> torch.Tensor | None:
        """The value of `get_global_grad_norm` as a deferred scalar, which waits for no step."""
        optimizer = self._training.optimizer
        if optimizer is None or optimizer.grad_norm is None:
            return None
        return DeferredTensor(optimizer.grad_norm.detach(), computes=True)

    def _with_a_share(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, with `num_items_in_batch` as a keyword that holds a replica's share."""
        names = self._training.placer.positional[: len(args)]
        if _ITEMS in names and len(names) == len(args):
            at = names.index(_ITEMS)
            args, kwargs = args[:at], kwargs | dict(zip(names[at:], args[at:], strict=True))
        if kwargs.get(_ITEMS) is None:
            return args, kwargs
        shared = self.shares_rows(args, kwargs)
        # A tensor, because a Python number would need a new program for each new value.
        items = torch.as_tensor(kwargs[_ITEMS], dtype=torch.float32, device="cpu")
        return args, kwargs | {_ITEMS: items / (local_replicas(self.mesh.spec) if shared else 1)}

    def _would_cache(self) -> bool:
        told = getattr(getattr(self.module, "config", None), "use_cache", None)
        parameters = inspect.signature(self.module.forward).parameters.values()
        # A parameter of that name counts whatever the config says: Trainer sets the config's to
        # False, and a decoder may have its own config.
        takes = any(p.name == "use_cache" for p in parameters) or (
            bool(told) and any(p.kind is p.VAR_KEYWORD for p in parameters)
        )
        if takes and told and is_new(("use_cache", type(self.module))):
            logger.info(
                "%s: use_cache=False in the engine's forward, a key-value cache is for generating",
                type(self.module).__name__,
            )
        return takes


def _on_devices(loss: torch.Tensor) -> torch.Tensor:
    """The loss on the devices, also of a script that has taken it to the CPU; gradients pass."""
    value = undefer(loss)
    return value if arrays.is_mine(value) else value.to(runtime.device())


def _comes_from(loss: torch.Tensor, module: torch.nn.Module) -> bool:
    own = {id(p) for p in module.parameters()}
    behind = nodes_behind(loss, ends=lambda _: False)
    return any(id(getattr(node, "variable", None)) in own for node in behind)
