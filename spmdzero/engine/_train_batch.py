"""`train_batch`: a whole step in one call."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from spmdzero.backend import held, let_in
from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._captured import CapturedSteps
from spmdzero.engine._loss import inputs_of, micro_batches
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._still_placed import naming_what_left
from spmdzero.state._training import Training

# The inputs of one forward.
Batch: TypeAlias = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


class TrainBatch:
    """Trains a whole step in one call; its micro-batches are captured."""

    def __init__(
        self, training: Training, *, accumulation: Accumulation, capture: CapturedSteps
    ) -> None:
        self._training, self._accumulation, self._capture = training, accumulation, capture

    def train_batch(self, data_iter: Iterator[Any] | Batch | None = None) -> torch.Tensor:
        """Runs one whole step: `gradient_accumulation_steps` micro-batches and the update.

        Steps are traced at first, then replayed: see `capture`, and ``"spmd": {"capture": false}``.

        Args:
            data_iter: yields the inputs of one forward: a tensor, a tuple of positional inputs or a
                dict of keyword inputs; or is one such batch with the rows of the whole step, which
                is cut into micro-batches. None uses the loader made from `training_data`, over and
                over. The module must return the loss, or a tuple or mapping that starts with it or
                names it ``"loss"``.

        Returns the mean loss over the micro-batches, a 0-dim tensor on the device; reading it
        waits for the step.

        Raises:
            SpmdZeroUsageError: the iterator ends in mid-step, a batch has a wrong number of rows,
                there is no data, or no loss; or the caller ends steps with
                `set_gradient_accumulation_boundary`.
        """
        with held():
            return self._train_batch(data_iter)

    def _train_batch(self, data_iter: Iterator[Any] | Batch | None) -> torch.Tensor:
        self._accumulation.require_whole_step()
        training, count = self._training, self._training.batch.accumulation
        managed = training.spmd_config.managed_gradient_accumulation
        if isinstance(data_iter, torch.Tensor | tuple | Mapping):
            batches = training.placer.cut(*inputs_of(data_iter), count)
        else:
            batches = micro_batches(self._data(data_iter), count)
        training.state.numbers["total"] = self._nothing_yet
        training.in_train_batch = True
        try:
            with naming_what_left(training):
                for index in range(1, count + 1):
                    with let_in():
                        args, kwargs = next(batches)
                    self._capture.micro_batch(args, kwargs, last=index == count, steps=managed)
        finally:
            training.in_train_batch = False
            if not self._accumulation.is_first_micro_batch():
                training.restart_step()
        return training.state["total"]

    @functools.cached_property
    def _nothing_yet(self) -> torch.Tensor:
        # Zero is uploaded, so that each micro-batch adds to it with the same graph.
        return self._training.mesh.place(torch.zeros((), dtype=torch.float32))

    def _data(self, given: Iterator[Any] | None) -> Iterator[Any]:
        training = self._training
        if given is not None:
            return given
        if training.training_dataloader is None:
            raise SpmdZeroUsageError(
                "train_batch() without data: pass data_iter, or training_data= to initialize"
            )
        return training.training_dataloader.stream()
