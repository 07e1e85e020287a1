"""`train_batch`: a whole step in one call."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from spmdzero.backend.torch_xla import DeviceMesh
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.engine._captured import CapturedSteps
from spmdzero.engine._launching import Launching
from spmdzero.engine._loss import find_loss, inputs_of, micro_batches
from spmdzero.engine._schedule import Scheduler
from spmdzero.errors import SpmdZeroUsageError

# What one forward takes.
Batch: TypeAlias = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]


class TrainBatch(Launching):
    """The engine's one-call style, whose programs are captured.

    Attributes:
        in_train_batch: whether `train_batch` is running.
    """

    mesh: DeviceMesh
    training_dataloader: ZeroDataLoader | None
    lr_scheduler: Scheduler | None
    _own_data: Iterator[Any] | None = None
    in_train_batch: bool = False
    _total: torch.Tensor | None = None
    _place_inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    _forward_placed: Callable[..., Any]
    _end_micro_batch: Callable[..., None]
    _restart_step: Callable[[], None]

    if TYPE_CHECKING:

        def backward(
            self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
        ) -> torch.Tensor: ...

        def step(self, lr_kwargs: dict[str, Any] | None = None) -> None: ...

    @functools.cached_property
    def capture(self) -> CapturedSteps:
        """Whether `train_batch` traces its micro-batches or replays them, and why."""
        return CapturedSteps(self)

    def train_batch(self, data_iter: Iterator[Any] | Batch | None = None) -> torch.Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches and the update.

        Traced at first, then replayed: see `capture`, and ``"spmd": {"capture": false}``.

        Args:
            data_iter: yields what one forward takes: a tensor, a tuple of positional inputs or a
                dict of keyword inputs; or is one such batch with the rows of the whole step, which
                is cut into its micro-batches. None uses the loader made from `training_data`,
                over and over. The module must return the loss, or a tuple or mapping that starts
                with it or names it ``"loss"``.

        Returns the mean loss over the micro-batches, a 0-dim tensor on the device; reading it
        waits for the step.

        Raises:
            SpmdZeroUsageError: the iterator ends in mid-step, a batch has other rows, there is no
                data, or no loss; or the caller ends steps, by
                `set_gradient_accumulation_boundary`.
        """
        self._require_whole_step()
        count = self._batch.accumulation
        managed = self.spmd_config.managed_gradient_accumulation
        if isinstance(data_iter, torch.Tensor | tuple | Mapping):
            batches = self._placer.cut(*inputs_of(data_iter), count)
        else:
            batches = micro_batches(self._data(data_iter), count)
        self._total = self._nothing_yet
        self.in_train_batch = True
        try:
            for index, (args, kwargs) in enumerate(batches, start=1):
                self.capture.micro_batch(args, kwargs, last=index == count, steps=managed)
        finally:
            self.in_train_batch = False
            if not self.is_first_micro_batch():
                self._restart_step()
        return self._total

    @functools.cached_property
    def _nothing_yet(self) -> torch.Tensor:
        # Uploaded, so that each micro-batch adds to it by the same graph.
        return self.mesh.place(torch.zeros((), dtype=torch.float32))

    def trace(self, forward: Callable[[], Any], *, ends: bool) -> None:
        """Traces a micro-batch and starts it; `ends` calls `step`, which may end the step."""
        loss = find_loss(forward())
        self.backward(loss)
        share = loss.detach() / self._batch.accumulation
        assert self._total is not None
        self._total = self.mesh.mark(self._total + share)
        # Alive, they would be outputs of the program.
        del loss, share
        if ends:
            self.step()
        else:
            self._end_unstepped()

    def _data(self, given: Iterator[Any] | None) -> Iterator[Any]:
        if given is not None:
            return given
        if self.training_dataloader is None:
            raise SpmdZeroUsageError(
                "train_batch() without data: pass data_iter, or training_data= to initialize"
            )
        if self._own_data is None:
            self._own_data = self.training_dataloader.endless()
        return self._own_data
