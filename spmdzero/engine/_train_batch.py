"""`train_batch`: a whole step in one call."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from spmdzero.backend import held, let_in
from spmdzero.backend.pure import Folds
from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._loss import find_loss, inputs_of, micro_batches
from spmdzero.engine._three_calls import ThreeCalls
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._still_placed import naming_what_left
from spmdzero.state._training import Training

# The inputs of one forward.
Batch: TypeAlias = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


class TrainBatch:
    """Trains a whole step in one call, by the three calls.

    Args:
        training: the training of the engine.
        accumulation: knows where steps end.
        calls: train each micro-batch.
        forward: `calls.forward` with the hooks around it.
    """

    def __init__(
        self,
        training: Training,
        *,
        accumulation: Accumulation,
        calls: ThreeCalls,
        forward: Callable[..., Any],
    ) -> None:
        self._training, self._accumulation = training, accumulation
        self._calls, self._forward = calls, forward
        self._folds = Folds.of_few(training.mesh)

    def train_batch(self, data_iter: Iterator[Any] | Batch | None = None) -> torch.Tensor:
        """Runs one whole step: `gradient_accumulation_steps` micro-batches and the update.

        The model's Python runs in the first steps: see `capture`.

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
        total = self._nothing_yet
        training.in_train_batch = True
        try:
            with naming_what_left(training):
                for index in range(1, count + 1):
                    with let_in():
                        args, kwargs = next(batches)
                    total = self._micro_batch(total, args, kwargs, ends=index == count or managed)
        finally:
            training.in_train_batch = False
            if not self._accumulation.is_first_micro_batch():
                training.restart_step()
        return total

    def _micro_batch(
        self, before: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, ends: bool
    ) -> torch.Tensor:
        """Trains a micro-batch; returns the mean of the step's losses so far.

        Args:
            before: that mean without this micro-batch. The caller holds it until the program has
                started: otherwise JAX's backend would donate its memory from the second
                micro-batch on, which would need a second program.
        """
        training = self._training
        loss = find_loss(self._forward(*args, **kwargs))
        # It is held until the step has started, as a script holds it: so both have one program.
        self._calls.backward(loss)
        total, count = training.current.losses[-1], training.batch.accumulation
        if count > 1:
            (total,) = self._folds(("total", count), _plus_share(count), [before, total])
        if ends:
            self._calls.step()
        else:
            self._calls.end_unstepped()
        return total

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


def _plus_share(count: int) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A function of the mean so far and a loss: the mean with that loss's share, one of `count`."""
    return lambda given: [given[0] + given[1] / count]
