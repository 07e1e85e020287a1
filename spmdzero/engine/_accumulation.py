"""Where a step ends: DeepSpeed's controls of gradient accumulation and batch size."""

import contextlib
from collections.abc import Iterator

from spmdzero._user_line import user_line
from spmdzero.backend import arrays, refuse_graph
from spmdzero.config import BatchSizes
from spmdzero.engine._direct_calls import DirectCalls
from spmdzero.engine._plan_of import planned_micro_batches
from spmdzero.errors import (
    SpmdZeroUsageError,
    UnsupportedCallError,
    UsageAssertionError,
    UsageValueError,
)
from spmdzero.state._still_placed import require_placed
from spmdzero.state._training import Training
from spmdzero.step._gradients import (
    Named,
    autograd_grad,
    parameters_with_grad,
    set_autograd_grad,
)

_NO_COALESCING = (
    "coalesce_grad_reduction needs ZeRO stage 1 or 2 and managed gradient accumulation. Use "
    "no_sync, or leave it out: the result is the same"
)


class Accumulation:
    """Gradient accumulation, managed by the engine's count or by the caller.

    Attributes:
        scaled: whether the gradients that autograd itself sums from now on come from a loss that
            was multiplied with fp16's loss scale.
    """

    def __init__(self, training: Training, direct_calls: DirectCalls | None) -> None:
        self._training, self._direct_calls = training, direct_calls
        self._boundary_override: bool | None = None
        self._stepping = False
        self._unreduced: str | None = None
        self.scaled = False

    @property
    def _managed(self) -> bool:
        return self._training.spmd_config.managed_gradient_accumulation

    def train_batch_size(self) -> int:
        """Number of samples of all devices in one step."""
        return self._training.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Number of rows that each device works on in one micro-batch."""
        return self._training.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches in one step."""
        return self._training.batch.accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step.

        With `"managed_gradient_accumulation": false` it is so only inside `step()`, as in
        DeepSpeed.
        """
        if self._boundary_override is not None:
            return self._boundary_override
        if not self._managed:
            return self._stepping
        return self._training.within_step + 1 == self._training.batch.accumulation

    def is_first_micro_batch(self) -> bool:
        """Whether the current micro-batch is the first of its step and has no gradient yet."""
        self.collect_gradients()
        if self._training.gradients.waiting:
            return False
        return self._boundary_override is not None or self._training.within_step == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the coming `step()` ends an accumulation, whatever the engine counts.

        Raises:
            UsageAssertionError: with `"managed_gradient_accumulation": false`, where every step is
                a boundary.
        """
        if not self._managed:
            raise UsageAssertionError(
                'set_gradient_accumulation_boundary with "managed_gradient_accumulation": false: '
                "there each step() is the boundary. Call step() when the gradients are complete"
            )
        self._boundary_override = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sums the gradients of the backward passes inside it on each device, without a reduction.

        The sums join the gradients of the next backward outside, and one reduction serves all. Each
        pass is a program of its own; all passes from the second on share one program.

        Raises:
            UsageAssertionError: at stages 2 and 3, whose gradients are shards, as in DeepSpeed; if
                contexts are nested; or for `step()` inside it.
        """
        if self._training.plan.stage >= 2:
            raise UsageAssertionError(
                "no_sync is incompatible with gradient partitioning logic of ZeRO stage "
                f"{self._training.plan.stage}. Use stage 1, or engine.coalesce_grad_reduction()"
            )
        with self._without_reduction("no_sync"):
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduces the gradients of all backward passes inside it once, when the context ends.

        Raises:
            UnsupportedCallError: at stage 0, as in DeepSpeed.
            UsageAssertionError: with `"managed_gradient_accumulation": false`, as in DeepSpeed; if
                contexts are nested; or for `step()` inside it.
        """
        if not self._managed:
            raise UsageAssertionError(_NO_COALESCING)
        if self._training.plan.stage == 0:
            raise UnsupportedCallError(_NO_COALESCING)
        with self._without_reduction("coalesce_grad_reduction"):
            yield
        self._training.gradients.reduce_deferred()

    @contextlib.contextmanager
    def _without_reduction(self, name: str) -> Iterator[None]:
        self.refuse_inside(name)
        self._unreduced = name
        self._training.gradients.deferring = True
        try:
            yield
        finally:
            self._unreduced = None
            self._training.gradients.deferring = False

    def refuse_inside(self, call: str) -> None:
        """Raises UsageAssertionError if `no_sync` or `coalesce_grad_reduction` is active."""
        if self._unreduced is not None:
            raise UsageAssertionError(
                f"engine.{call}() inside engine.{self._unreduced}(): leave that context first"
            )

    def require_whole_step(self) -> None:
        """Raises SpmdZeroUsageError if `train_batch` would not be one whole step."""
        self.refuse_inside("train_batch")
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

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples of a step by changing the number of its micro-batches.

        Raises:
            UsageValueError: the size is not a multiple of the rows of a micro-batch on all devices.
            SpmdZeroUsageError: in the middle of an accumulation.
        """
        micro, devices = self._training.batch.micro, self._training.mesh.replicas
        steps, rest = divmod(train_batch_size, micro * devices)
        if train_batch_size < 1 or rest:
            raise UsageValueError(
                f"Train batch size must be divisible by micro-batch data parallelism: "
                f"{train_batch_size} is no multiple of train_micro_batch_size_per_gpu "
                f"({micro}) x {devices} devices"
            )
        self._resize(micro=micro, steps=steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the rows of each device in one micro-batch; the number of micro-batches stays.

        Raises:
            SpmdZeroUsageError: a size below 1, or in the middle of an accumulation.
        """
        if micro_batch_size < 1:
            raise SpmdZeroUsageError(f"a micro-batch has 1 row or more, got {micro_batch_size}")
        self._resize(micro=micro_batch_size, steps=self._training.batch.accumulation)

    def _resize(self, *, micro: int, steps: int) -> None:
        training = self._training
        if not self.is_first_micro_batch():
            raise SpmdZeroUsageError(
                "the batch size can't change in the middle of a gradient accumulation: finish the "
                "micro-batches with backward and step first"
            )
        train = micro * steps * training.mesh.replicas
        batch = BatchSizes(train=train, micro=micro, accumulation=steps)
        if steps != training.batch.accumulation:
            # DeepSpeed goes on counting, which can make the first step after the change a short
            # one.
            training.counters.counted_from = training.counters.micro_steps
            planned = planned_micro_batches(training.spmd_config, batch)
            training.gradients.replan(training.plan.with_accumulation(planned))
        training.batch = batch
        training.placer.rows.micro_batch = micro

    def collect_gradients(self) -> None:
        """Takes over the gradients that autograd accumulated.

        With a global forward autograd accumulates all gradients; otherwise only those of a loss
        term that was computed outside of the module, such as a weight penalty.

        Raises:
            SpmdZeroUsageError: a gradient has a graph, from `backward(create_graph=True)`; or, in
                fp16, its loss was not scaled.
        """
        found = parameters_with_grad(self._training.state.parameters.items())
        line = self._training.current.take_direct_backward()
        if found and not self.scaled:
            self._require_scaled(found, line)
        for name, parameter in found:
            grad = autograd_grad(parameter)
            assert grad is not None
            if grad.requires_grad:
                set_autograd_grad(parameter, None)
                refuse_graph()
            if not arrays.is_mine(grad):
                # The module was moved off the devices and then trained by plain torch.
                require_placed(self._training)
            across = self._training.mesh.across
            whole = grad if across is None else across.mean(grad)
            self._training.gradients.add_global(name, whole)
            set_autograd_grad(parameter, None)
            if self._direct_calls is not None and not self._training.current.ran_forward:
                self._direct_calls.say_gradients(self._training.module)

    def _require_scaled(self, found: list[Named], line: str | None) -> None:
        optimizer = self._training.optimizer
        if optimizer is None or not self._training.spmd_config.fp16.enabled:
            return
        for _, parameter in found:
            set_autograd_grad(parameter, None)
        name, scale = type(self._training.module).__name__, optimizer.loss_scale
        line = line or user_line(otherwise="in a step")
        raise SpmdZeroUsageError(
            f"{line}: {name} has gradients of a loss that was not "
            f"multiplied with fp16's loss scale, by which the step divides: they would be {scale:g}"
            " times too small. Call engine.backward(loss), or engine.scale(loss).backward(), "
            "outside of engine(...) too"
        )

    def step_is_boundary(self) -> bool:
        """Whether the running `step()` ends an accumulation."""
        self._stepping = True
        try:
            return self.is_gradient_accumulation_boundary()
        finally:
            self._stepping = False

    def samples_of_step(self) -> int:
        """Number of samples of all devices in the step that ends."""
        batch = self._training.batch
        if self._managed:
            return batch.train
        return batch.train // batch.accumulation * self._training.counters.backwards
