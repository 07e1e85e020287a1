"""The engine of a `PipelineModule`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from spmdzero.compat.engine import DeepSpeedEngine
from spmdzero.compat.pipe._module import PipelineModule
from spmdzero.errors import SpmdZeroUsageError


class PipelineEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` with the methods of DeepSpeed's for pipelines (runtime/pipe/engine.py).

    `spmdzero.initialize` makes it of a `PipelineModule`. A batch is a pair of inputs and labels.
    The three calls work too, ``engine(inputs, labels)`` among them.
    """

    _pairs_to_train: Iterator[Any] | None = None
    _make_pair: Callable[[Any], Any] | None = None

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Trains a step; returns its mean loss, 0-dim on the device.

        Args:
            data_iter: yields a micro-batch of each, here and in later calls; None for that of
                before, or the loader of `training_data`.

        Raises:
            RuntimeError: gradients are off.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "train_batch() requires gradients enabled. Use eval_batch() instead."
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        given, loader = self._pairs_to_train, self._training.training_dataloader
        if given is None and loader is not None:
            given = loader.stream()
        return super().train_batch(None if given is None else self._adapted(given))

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of micro-batches, 0-dim on the device, with the module in eval mode.

        Args:
            data_iter: yields the micro-batches.
            return_logits: whether to return the last micro-batch's output beside it.
            compute_loss: if not, outputs take the loss's place.
            reduce_output: ``"avg"`` for their mean, None for a list of them.
            bcast_loss: has no effect: every process has the loss.
            num_micro_batches: their number, that of a step by default.
        """
        self.module.eval()
        found, outputs = list[Any](), None
        pipeline: Any = self.module
        batches = self._adapted(data_iter)
        for _ in range(num_micro_batches or self.gradient_accumulation_steps()):
            inputs, labels = next(batches)
            if compute_loss and not return_logits:
                found.append(self(inputs, labels))
                continue
            outputs = self(inputs)
            if compute_loss and pipeline.loss_fn is not None:
                found.append(
                    pipeline.loss_fn(outputs, tree_map_only(torch.Tensor, self._placed, labels))
                )
            else:
                found.append(outputs)
        whole = found if reduce_output is None else sum(found[1:], start=found[0]) / len(found)
        return (whole, outputs) if return_logits else whole

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Sets what `train_batch` takes its micro-batches from."""
        self._pairs_to_train = iter(iterator)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """`set_dataiterator` of a loader."""
        self.set_dataiterator(iter(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Has a function make a pair of inputs and labels of each batch."""
        self._make_pair = fn

    def is_first_stage(self) -> bool:
        """True: every process has all layers."""
        return True

    def is_last_stage(self) -> bool:
        """True: every process has all layers."""
        return True

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def _adapted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            made = batch if self._make_pair is None else self._make_pair(batch)
            if not isinstance(made, list | tuple) or len(made) != 2:
                raise SpmdZeroUsageError(
                    "a batch of a PipelineModule is a pair of inputs and labels, and this is a "
                    f"{type(made).__name__}: engine.set_batch_fn(fn) makes one of it"
                )
            yield tuple(made)


def engine_class_of(model: object) -> type[DeepSpeedEngine]:
    """The class of engine for a model."""
    return PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
