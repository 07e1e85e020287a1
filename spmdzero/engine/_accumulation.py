"""Where a step ends: DeepSpeed's controls of gradient accumulation and batch size."""

import contextlib
import functools
from collections.abc import Iterator

from torch import nn

from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.data._inputs import InputPlacer
from spmdzero.engine._direct_calls import DirectCalls
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.engine._state import EngineState
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.step._autograd import autograd_grad, set_autograd_grad


def planned_micro_batches(config: SpmdZeroConfig, batch: BatchSizes) -> int:
    """The micro-batches of a step for which gradients need a place to wait."""
    # Who says himself where a step ends may always have more than one micro-batch in it.
    return (
        batch.accumulation if config.managed_gradient_accumulation else max(2, batch.accumulation)
    )


class Accumulation(EngineState):
    """Gradient accumulation, managed by the engine's count or by the caller."""

    _placer: InputPlacer
    _boundary_override: bool | None = None
    _stepping: bool = False
    _unreduced: str | None = None
    # Whether a forward of this engine with gradients ran since the latest step ended: those of all
    # its micro-batches may run before the first backward.
    _ran_forward: bool = False
    _direct_calls: DirectCalls | None = None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step.

        With `"managed_gradient_accumulation": false` only inside `step()`, as in DeepSpeed.
        """
        if self._boundary_override is not None:
            return self._boundary_override
        if not self.spmd_config.managed_gradient_accumulation:
            return self._stepping
        return self._within_step() + 1 == self._batch.accumulation

    def is_first_micro_batch(self) -> bool:
        """Whether the current micro-batch is the first of its step and has no gradient yet."""
        self._collect_global_gradients()
        if self._gradients.waiting:
            return False
        return self._boundary_override is not None or self._within_step() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the coming `step()` ends an accumulation, whatever the engine counts.

        Raises:
            SpmdZeroUsageError: with `"managed_gradient_accumulation": false` every step does.
        """
        if not self.spmd_config.managed_gradient_accumulation:
            raise SpmdZeroUsageError(
                'set_gradient_accumulation_boundary with "managed_gradient_accumulation": false: '
                "there each step() is the boundary. Call step() when the gradients are complete"
            )
        self._boundary_override = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sums the gradients of the backward passes inside on each device, without a reduction.

        They join the next backward's outside, whose reduction serves all.

        Raises:
            SpmdZeroUsageError: at stage 2, whose gradients are shards, as in DeepSpeed; nested; or
                `step()` inside.
        """
        if self.plan.stage == 2:
            raise SpmdZeroUsageError(
                "no_sync is incompatible with gradient partitioning logic of ZeRO stage 2. Use "
                "stage 1, or engine.coalesce_grad_reduction()"
            )
        with self._without_reduction("no_sync"):
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduces the gradients of all backward passes inside once, when it ends.

        Raises:
            SpmdZeroUsageError: at stage 0, with `"managed_gradient_accumulation": false`, as in
                DeepSpeed; nested; or `step()` inside.
        """
        if not self.spmd_config.managed_gradient_accumulation or self.plan.stage == 0:
            raise SpmdZeroUsageError(
                "coalesce_grad_reduction needs ZeRO stage 1 or 2 and managed gradient "
                "accumulation. Use no_sync, or leave it out: the result is the same"
            )
        with self._without_reduction("coalesce_grad_reduction"):
            yield
        self._gradients.reduce_deferred()

    @contextlib.contextmanager
    def _without_reduction(self, name: str) -> Iterator[None]:
        self._refuse_inside(name)
        self._unreduced = name
        self._gradients.deferring = True
        try:
            yield
        finally:
            self._unreduced = None
            self._gradients.deferring = False

    def _refuse_inside(self, call: str) -> None:
        if self._unreduced is not None:
            raise SpmdZeroUsageError(
                f"engine.{call}() inside engine.{self._unreduced}(): leave that context first"
            )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples of a step by changing the number of its micro-batches.

        Raises:
            SpmdZeroUsageError: not a multiple of a micro-batch on all devices, or in the middle
                of an accumulation.
        """
        rows = self._batch.micro * self.mesh.size
        if train_batch_size < 1 or train_batch_size % rows:
            raise SpmdZeroUsageError(
                f"Train batch size must be divisible by micro-batch data parallelism: "
                f"{train_batch_size} is no multiple of train_micro_batch_size_per_gpu "
                f"({self._batch.micro}) x {self.mesh.size} devices"
            )
        steps = train_batch_size // rows
        self._resize(
            BatchSizes(train=train_batch_size, micro=self._batch.micro, accumulation=steps)
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the rows of each device in one micro-batch; their number stays.

        Raises:
            SpmdZeroUsageError: below 1, or in the middle of an accumulation.
        """
        if micro_batch_size < 1:
            raise SpmdZeroUsageError(f"a micro-batch has 1 row or more, got {micro_batch_size}")
        steps = self._batch.accumulation
        train = micro_batch_size * steps * self.mesh.size
        self._resize(BatchSizes(train=train, micro=micro_batch_size, accumulation=steps))
        self._placer.rows.micro_batch = micro_batch_size

    def _resize(self, batch: BatchSizes) -> None:
        if not self.is_first_micro_batch():
            raise SpmdZeroUsageError(
                "the batch size can't change in the middle of a gradient accumulation: finish the "
                "micro-batches with backward and step first"
            )
        if batch.accumulation != self._batch.accumulation:
            # DeepSpeed's count goes on, which can make the first step after the change a short one.
            self._counters.counted_from = self.micro_steps
            planned = planned_micro_batches(self.spmd_config, batch)
            self.plan = self.plan.with_accumulation(planned)
            self._gradients.replan(self.plan)
        self._batch = batch

    @functools.cached_property
    def _named_parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        # Walking through the module costs milliseconds a step, and the plan knows only these.
        return tuple(self.module.named_parameters())

    def _collect_global_gradients(self) -> None:
        # With a global forward these are all gradients; otherwise what a loss term that was
        # computed outside of the module, such as a weight penalty, gives.
        for name, parameter in self._named_parameters:
            if (grad := autograd_grad(parameter)) is not None:
                self._gradients.add_global(name, grad)
                set_autograd_grad(parameter, None)
                if self._direct_calls is not None and not self._ran_forward:
                    self._direct_calls.say_gradients(self.module)

    def _require_whole_step(self) -> None:
        self._refuse_inside("train_batch")
        if self._boundary_override is not None:
            raise SpmdZeroUsageError(
                "train_batch after set_gradient_accumulation_boundary, which says where a step "
                "ends: call engine(...), backward and step yourself"
            )
        if not self.is_first_micro_batch():
            raise SpmdZeroUsageError(
                "train_batch in the middle of a gradient accumulation: finish the micro-batches "
                "with backward and step first"
            )

    def _within_step(self) -> int:
        if not self.spmd_config.managed_gradient_accumulation:
            return 0
        return self._counters.within_step(self._batch.accumulation)

    def _step_is_boundary(self) -> bool:
        self._stepping = True
        try:
            return self.is_gradient_accumulation_boundary()
        finally:
            self._stepping = False

    def _samples_of_step(self) -> int:
        if self.spmd_config.managed_gradient_accumulation:
            return self._batch.train
        return self._batch.train // self._batch.accumulation * self._counters.backwards

    def _require_optimizer(self, call: str) -> ZeroOptimizer:
        if self.optimizer is None:
            raise SpmdZeroUsageError(
                f"engine.{call}() without an optimizer: name one in the config "
                '("optimizer": {"type": "AdamW", ...}) or pass optimizer= to initialize'
            )
        return self.optimizer
