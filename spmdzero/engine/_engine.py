"""The engine: DeepSpeed's forward / backward / step over a module that lives on a mesh."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.config import BatchSizes, SpmdZeroConfig
from spmdzero.engine._counters import Counters
from spmdzero.engine._gradients import GradientStore, autograd_grad, set_autograd_grad
from spmdzero.engine._health import LossHealth
from spmdzero.engine._inputs import InputPlacer
from spmdzero.engine._loader import ZeroDataLoader
from spmdzero.engine._loss import as_positional, check_loss, find_loss
from spmdzero.engine._module_methods import ModuleMethods
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.engine._refused import RefusedMethods
from spmdzero.engine._schedule import Scheduler, require_metrics
from spmdzero.engine._snapshot import StepGraph
from spmdzero.engine._state import EngineState
from spmdzero.errors import NonFiniteError, SpmdZeroUsageError
from spmdzero.plan import ShardingPlan
from spmdzero.xla import DeviceMesh, GlobalForward, ReplicaRegion, record_scopes, runtime

logger = logging.getLogger("spmdzero")


class Engine(EngineState, ModuleMethods, RefusedMethods):
    """Trains `module` under a sharding plan, called as a DeepSpeedEngine is.

    Made by `spmdzero.initialize`. Unknown attributes fall through to the module.

    Attributes:
        module: the user's module, its parameters on the devices.
        optimizer: a `ZeroOptimizer`, None when the config and the call named none.
        lr_scheduler: stepped at each gradient accumulation boundary.
        training_dataloader: the loader made from `training_data`.
        plan: where every tensor lives.
        device: the virtual device that stands for the mesh.
        donated_inputs: kind of program -> inputs whose buffers it reuses, once compiled.
        global_steps, micro_steps, global_samples: DeepSpeed's counters.
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
        self.training_dataloader: ZeroDataLoader | None = None
        self._own_data: Iterator[Any] | None = None
        self._batch, self._placer, self._forward = batch, placer, forward
        self._region = forward if isinstance(forward, ReplicaRegion) else None
        self._gradients, self._health = gradients, health
        self._counters = Counters()
        self._backward_done = False
        self._step_applied = False
        self._observers: list[Callable[[StepGraph], None]] = []
        self._losses: list[torch.Tensor] = []
        self.donated_inputs: dict[str, int] = {}

    # -- the three calls -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on one micro-batch.

        Args:
            args, kwargs: the module's own. Tensors whose dim 0 has
                `train_micro_batch_size_per_gpu x local devices` rows are batches and are split
                over the devices; every other tensor goes to each device whole
                (`spmdzero.replicated(t)` says so of one that only looks like a batch). Tensors
                may be on the CPU or on `engine.device`.

        Returns what the module returns, as global tensors: batches with all rows, floating
        scalars as their mean over the devices.

        Raises:
            SpmdZeroUsageError: there are tensors, and none has the expected number of rows (in
                evaluation: rows that the devices can share equally).
            ReplicaRegionError: the module does what can't be done per replica.
        """
        placed_args, placed_kwargs = self._placer(args, kwargs, training=self.module.training)
        return self._forward(placed_args, placed_kwargs)

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
        scaled = loss / self._batch.accumulation if scale_wrt_gas else loss
        region = self._region.backward() if self._region else contextlib.nullcontext()
        # In this thread: autograd's own may let go of a last pending tensor only after the step's
        # program was cut, which then has one output more and compiles once more.
        with region, torch.autograd.set_multithreading_enabled(False):
            scaled.backward(retain_graph=retain_graph)
        self._collect_global_gradients()
        detached = self.mesh.mark(loss.detach().reshape(()).clone())
        self._health.watch(detached, step=self.global_steps)
        self._losses.append(detached)
        self._backward_done = True
        return scaled.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the gradient accumulation boundary, updates the parameters.

        Starts the compiled program on the devices; a TPU runs it while Python goes on, the CPU
        runtime may return only when it is done.

        Raises:
            SpmdZeroUsageError: no `backward` since the last step, or no optimizer.
            NonFiniteError: `"spmd": {"check_finite": true}` and a loss or the gradient norm is
                not finite; parameters and states are as before.
            ReplicaRegionError: an integer output or buffer differs between replicas.
        """
        if not self._backward_done:
            raise SpmdZeroUsageError(
                "engine.step() before engine.backward(loss): there is no gradient to use. Each "
                "micro-batch is loss = engine(...); engine.backward(loss); engine.step()"
            )
        if self.optimizer is None:
            raise SpmdZeroUsageError(
                "engine.step() without an optimizer: name one in the config "
                '("optimizer": {"type": "AdamW", ...}) or pass optimizer= to initialize'
            )
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            require_metrics(self.lr_scheduler, lr_kwargs or {})
        self._step_applied = False
        if boundary:
            self.optimizer.step()
        self._backward_done = False
        self._launch("boundary" if boundary else "micro")
        try:
            self._health.raise_if_asked(self.optimizer.grad_norm if boundary else None)
        except NonFiniteError:
            self._restart_step()
            raise
        self._step_applied = boundary
        self._counters.micro_steps += 1
        if boundary:
            self._finish_step(lr_kwargs or {})
        self._losses = [] if boundary else self._losses

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches and the update.

        Args:
            data_iter: yields what one forward takes: a tensor, a tuple of positional inputs or a
                dict of keyword inputs. None uses the loader made from `training_data`, over and
                over. The module must return the loss, or a tuple or mapping that starts with it
                or names it ``"loss"``.

        Returns the mean loss over the micro-batches, a 0-dim tensor on the device; reading it
        waits for the step.

        Raises:
            SpmdZeroUsageError: the iterator ends in mid-step, there is no data, or no loss.
        """
        if not self.is_first_micro_batch():
            raise SpmdZeroUsageError(
                "train_batch in the middle of a gradient accumulation: finish the micro-batches "
                "with backward and step first"
            )
        if data_iter is None:
            if self.training_dataloader is None:
                raise SpmdZeroUsageError(
                    "train_batch() without data: pass data_iter, or training_data= to initialize"
                )
            if self._own_data is None:
                self._own_data = self.training_dataloader.endless()
            data_iter = self._own_data
        if not isinstance(data_iter, Iterator):
            raise SpmdZeroUsageError(
                f"train_batch takes an iterator, got {type(data_iter).__name__}: make one with "
                "iter(...) once, before the training loop"
            )
        # Uploaded, so that each micro-batch adds to it by the same graph.
        total = self.mesh.place(torch.zeros(()))
        try:
            total = self._micro_batches(data_iter, total)
        finally:
            if not self.is_first_micro_batch():
                self._restart_step()
        return total

    def _micro_batches(self, data_iter: Iterator[Any], total: torch.Tensor) -> torch.Tensor:
        for index in range(self._batch.accumulation):
            try:
                batch = next(data_iter)
            except StopIteration:
                raise SpmdZeroUsageError(
                    f"the data ended after {index} of {self._batch.accumulation} micro-batches of "
                    "one step"
                ) from None
            loss = find_loss(
                self(**batch) if isinstance(batch, Mapping) else self(*as_positional(batch))
            )
            self.backward(loss)
            total = self.mesh.mark(total + loss.detach() / self._batch.accumulation)
            self.step()
        return total

    # -- what the three calls are made of --------------------------------------------------

    def _collect_global_gradients(self) -> None:
        # With a global forward these are all gradients; otherwise what a loss term that was
        # computed outside of the module, such as a weight penalty, gives.
        for name, parameter in self.module.named_parameters():
            if (grad := autograd_grad(parameter)) is not None:
                self._gradients.add_global(name, grad)
                set_autograd_grad(parameter, None)

    def _launch(self, kind: str) -> None:
        if self._observers:
            outputs = self.named_tensors()
            outputs |= {f"loss/{i}": loss for i, loss in enumerate(self._losses)}
            if kind == "boundary" and self.optimizer and self.optimizer.grad_norm is not None:
                outputs["norm/global"] = self.optimizer.grad_norm
            for observer in self._observers:
                observer(StepGraph(kind=kind, outputs=outputs))
        compiled = runtime.compile_count()
        runtime.sync()
        if runtime.compile_count() > compiled:
            self.donated_inputs[kind] = runtime.aliased_inputs()
        if self._region is not None and self._counters.micro_steps < 2:
            # Later disagreements are read at the print steps, so as not to stall every step.
            self._region.check_agreement()

    def _restart_step(self) -> None:
        self._gradients.clear()
        self._backward_done = False
        self._counters.micro_steps -= self.micro_steps % self._batch.accumulation
        self._losses = []

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor under ``<role>/<name>``: parameters, buffers, accumulators, states."""
        tensors = {f"parameter/{n}": p for n, p in self.module.named_parameters()}
        tensors |= {f"buffer/{n}": b for n, b in self.module.named_buffers()}
        tensors |= {f"accumulator/{n}": a for n, a in self._gradients.accumulators.items()}
        return tensors | (self.optimizer.named_states() if self.optimizer else {})

    def _finish_step(self, lr_kwargs: dict[str, Any]) -> None:
        self._counters.global_steps += 1
        self._counters.global_samples += self._batch.train
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        every = self.spmd_config.steps_per_print
        if every and self.global_steps % every == 0:
            self._report()

    def _report(self) -> None:
        if self._region is not None:
            self._region.check_agreement()
        self._health.log_if_bad()
        if runtime.process_index() == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom(),
            )  # fmt: skip

    @contextlib.contextmanager
    def observe(self, observer: Callable[[StepGraph], None]) -> Iterator[None]:
        """Hands `observer` each program's pending graph just before it is compiled and run."""
        self._observers.append(observer)
        try:
            record_scopes(True)
            yield
        finally:
            record_scopes(False)
            self._observers.remove(observer)
