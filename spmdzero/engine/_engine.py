"""The engine: DeepSpeed's forward / backward / step over a module that lives on a mesh."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmdzero.backend.torch_xla import (
    DeviceMesh,
    GlobalForward,
    ReplicaRegion,
    map_tensors,
    runtime,
)
from spmdzero.compat.getters._refused import RefusedMethods
from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.data._inputs import InputPlacer, to_half
from spmdzero.data._loader import ZeroDataLoader
from spmdzero.engine._backward import BackwardWatch
from spmdzero.engine._checkpoints import Checkpoints
from spmdzero.engine._counters import Counters
from spmdzero.engine._exports import Exports
from spmdzero.engine._folded_call import keep_waiting
from spmdzero.engine._loss import check_loss
from spmdzero.engine._module_methods import ModuleMethods
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.engine._schedule import Scheduler, require_metrics
from spmdzero.engine._skip_log import SkipLog
from spmdzero.engine._train_batch import TrainBatch
from spmdzero.errors import NonFiniteError, SpmdZeroRuntimeError, SpmdZeroUsageError
from spmdzero.plan import ShardingPlan
from spmdzero.step._agreement import AgreementRhythm
from spmdzero.step._gradients import GradientStore
from spmdzero.step._loss_health import LossHealth
from spmdzero.step._numbers import loss_scale_number

logger = logging.getLogger("spmdzero")


class Engine(TrainBatch, Checkpoints, Exports, ModuleMethods, RefusedMethods):
    """Trains `module` under a sharding plan, called as a DeepSpeedEngine is.

    Made by `spmdzero.initialize`. Unknown attributes fall through to the module.

    Attributes:
        module: the user's module, its parameters on the devices.
        optimizer: a `ZeroOptimizer`, None when the config and the call named none.
        lr_scheduler: stepped at each gradient accumulation boundary.
        training_dataloader: the loader made from `training_data`.
        plan: where every tensor lives.
        device: the virtual device that stands for the mesh.
        audit, doctor: what is wrong with its steps; see `spmdzero.audit`, `spmdzero.doctor`.
        donated_inputs: kind of program -> inputs whose buffers it reuses, once compiled.
        global_steps, micro_steps, global_samples: DeepSpeed's counters.
        capture: whether `train_batch` traces or replays, and why.
        folding: whether the three calls trace, and why.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        config: SpmdZeroConfig,
        batch: BatchSizes,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        placer: InputPlacer,
        forward: ReplicaRegion | GlobalForward,
        gradients: GradientStore,
        optimizer: ZeroOptimizer | None,
        lr_scheduler: Scheduler | None,
        health: LossHealth,
    ) -> None:
        super().__init__()
        self.module = module
        self.spmd_config, self.plan, self.mesh = config, plan, mesh
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self._observers, self._losses, self.donated_inputs = [], [], {}
        self.training_dataloader: ZeroDataLoader | None = None
        self._batch, self._placer, self._forward = batch, placer, forward
        self._region = forward if isinstance(forward, ReplicaRegion) else None
        self._gradients, self._health = gradients, health
        self._counters = Counters()
        self._skip_log = SkipLog()
        self._watch = BackwardWatch(
            region=self._region,
            accumulation=self.gradient_accumulation_steps,
            needs_scale=config.fp16.enabled and optimizer is not None,
        )
        self._backward_done = False
        self._step_applied = False
        self._agreement = AgreementRhythm()
        self.after_step: list[Callable[[Engine], None]] = []

    # -- the three calls -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on one micro-batch.

        Args:
            args, kwargs: the module's own. Tensors whose dim 0 has
                `train_micro_batch_size_per_gpu x local devices` rows are batches and are split
                over the devices, and so are the same inputs with fewer rows later; every other
                tensor goes to each device whole (`spmdzero.replicated(t)` says so of one that
                only looks like a batch). Tensors may be on the CPU or on `engine.device`.

        Returns what the module returns, as global tensors: batches with all rows, floating
        scalars as their mean over the devices.

        Raises:
            SpmdZeroUsageError: there are tensors, and none has the rows of a whole micro-batch, or
                of a short one after it (in evaluation: rows that the devices can share equally).
            ReplicaRegionError: the module does what can't be done per replica.
        """
        if self._backward_done and self._gradients.accumulators and not self._unreduced:
            # The caller goes on without a step, which would have ended this micro-batch's program.
            self._end_unstepped()
        return self._forward_placed(*self._place_inputs(args, kwargs))

    def _place_inputs(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.spmd_config.fp16.auto_cast:
            args, kwargs = map_tensors((args, kwargs), lambda _, tensor: to_half(tensor))
        return self._placer(args, kwargs, training=self.module.training)

    def _forward_placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note_call()
        self._ran_forward = self._ran_forward or torch.is_grad_enabled()
        output = self.folding.forward(args, kwargs)
        return self._watch.watch(output) if torch.is_grad_enabled() else output

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulates the gradients of `loss`.

        Args:
            loss: a scalar that depends on what `engine(...)` returned.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: divide by `gradient_accumulation_steps`, so that the step uses the
                mean over micro-batches.

        Returns the loss that was differentiated: `loss / gradient_accumulation_steps`.

        Raises:
            SpmdZeroUsageError: not a scalar, or not made by a forward of this engine.
        """
        check_loss(loss)
        averaged = loss / self._batch.accumulation if scale_wrt_gas else loss
        with self._watch.by_engine(loss):
            self._times_loss_scale(averaged).backward(retain_graph=retain_graph)
        self._collect_global_gradients()
        detached = self.mesh.mark(loss.detach().reshape(()).clone())
        self._health.watch(detached, step=self.global_steps)
        self._losses.append(detached)
        self._backward_done = True
        self._counters.backwards += 1
        return averaged.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for `engine.scale(loss).backward()`.

        Only fp16 has a scale other than 1. A plain backward is divided by
        `gradient_accumulation_steps` as `engine.backward` is.

        Raises:
            SpmdZeroUsageError: not a scalar, not made by a forward, or no optimizer.
        """
        check_loss(loss)
        self._require_optimizer("scale")
        self._watch.expect_scaled()
        return self._times_loss_scale(loss)

    def _times_loss_scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaler = self.optimizer.loss_scaler if self.optimizer else None
        # As data: a Python number would be another program at each change of the scale.
        return loss if scaler is None else loss * self.mesh.place(loss_scale_number(scaler))

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the gradient accumulation boundary, updates the parameters.

        Starts the compiled program on the devices; a TPU runs it while Python goes on, the CPU
        runtime may return only when it is done.

        Raises:
            SpmdZeroUsageError: no `backward` since the last step, or no optimizer.
            NonFiniteError: `"spmd": {"check_finite": true}` and a loss or the gradient norm is
                not finite; parameters and states are as before, and the step starts anew.
            SpmdZeroRuntimeError: an overflow at fp16's smallest loss scale; likewise.
            ReplicaRegionError: an integer output or buffer differs between replicas, which is
                read now and then (`AgreementRhythm`); the micro-batch counts all the same.
        """
        self._step_applied = False
        self._refuse_inside("step")
        optimizer = self._require_optimizer("step")
        self._collect_global_gradients()
        if not self._backward_done and not self._gradients.waiting:
            raise SpmdZeroUsageError(
                "engine.step() before engine.backward(loss): there is no gradient to use. Each "
                "micro-batch is loss = engine(...); engine.backward(loss); engine.step()"
            )
        boundary = self._step_is_boundary()
        # Runs Python of other engines' modules, so before anything of this step is spent.
        keep_waiting(ending=self if boundary else None)
        if boundary:
            require_metrics(self.lr_scheduler, lr_kwargs or {})
            optimizer.folds.wanted = self.folding.before_update()
            try:
                optimizer.step()
            except BaseException:
                # Some gradients are spent already, and the rest would be half of a step.
                self._restart_step()
                raise
        # `explain` leaves here, before the program is run; its gradients are spent.
        self._backward_done = False
        failure = self._launch("boundary" if boundary else "micro")
        self._end_micro_batch(boundary=boundary, optimizer=optimizer, lr_kwargs=lr_kwargs or {})
        if failure is not None:
            raise failure

    # -- what the three calls are made of --------------------------------------------------

    def _end_micro_batch(
        self, *, boundary: bool, optimizer: ZeroOptimizer, lr_kwargs: dict[str, Any]
    ) -> None:
        self._backward_done = self._step_applied = False
        self._ran_forward = self._ran_forward and not boundary
        try:
            skipped = self._was_skipped(optimizer, boundary=boundary)
        except (NonFiniteError, SpmdZeroRuntimeError):
            if boundary:
                optimizer.forget_skip()
            self._restart_step()
            self.programs.stepped()
            raise
        self._step_applied = boundary and not skipped
        self._counters.pass_micro_batch()
        try:
            if boundary:
                self._finish_step(optimizer, lr_kwargs, skipped=skipped)
            if self._region is not None and self._agreement.is_due():
                self._region.check_agreement()
        finally:
            # The step is done, whatever a schedule, a monitor or a check has to say about it.
            self._losses = [] if boundary else self._losses
            self.programs.stepped()

    def _was_skipped(self, optimizer: ZeroOptimizer, *, boundary: bool) -> bool:
        """Whether an overflow skipped the step, as far as the host asks; updates the loss scale.

        Raises:
            NonFiniteError, SpmdZeroRuntimeError: see `step`.
        """
        # A dynamic loss scale finds its size by overflows: they are no failure.
        checked = boundary and not optimizer.dynamic_loss_scale
        self._health.raise_if_asked(optimizer.grad_norm if checked else None)
        if not boundary or optimizer.loss_scaler is None:
            return False
        # The one read of a step: the scale and the schedule depend on it.
        skipped = optimizer.overflow
        optimizer.loss_scaler.update_scale(skipped)
        return skipped

    def _restart_step(self) -> None:
        self._gradients.clear()
        self._backward_done = False
        self._counters.restart_step()
        self._losses = []

    def _finish_step(
        self, optimizer: ZeroOptimizer, lr_kwargs: dict[str, Any], *, skipped: bool
    ) -> None:
        self._counters.pass_step(samples=self._samples_of_step(), skipped=skipped)
        hold = optimizer.hold
        if skipped:
            self._skip_log.tell(
                self.skipped_steps,
                step=self.global_steps,
                since=self.global_steps - 1,
                # A dynamic loss scale is found by such steps.
                level=logging.INFO if optimizer.dynamic_loss_scale else logging.WARNING,
            )
            if hold is not None:
                hold.stand_still()
        elif self.lr_scheduler is not None and (hold is None or hold.advance()):
            self.lr_scheduler.step(**lr_kwargs)
        every = self.spmd_config.steps_per_print
        if every and self.global_steps % every == 0:
            self._report()
        for hook in self.after_step:
            hook(self)

    def _report(self) -> None:
        if self._region is not None:
            self._region.check_agreement()
        self._health.log_if_bad()
        if runtime.process_index() == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom(),
            )  # fmt: skip
