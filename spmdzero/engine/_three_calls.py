"""The three calls of DeepSpeed's training loop: forward, backward and step."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from spmdzero._cuda import warn_of_cpus_autocast
from spmdzero._user_line import user_line
from spmdzero.backend import (
    Across,
    RegionRules,
    arrays,
    held,
    is_transforming,
    keep_same,
    map_tensors,
    to_own_rows,
)
from spmdzero.data._inputs import to_half
from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._backward import BackwardWatch
from spmdzero.engine._captured import CapturedCalls
from spmdzero.engine._folded_call import DirectPass, keep_waiting
from spmdzero.engine._launching import Launching
from spmdzero.engine._loss import check_loss, runs_forwards
from spmdzero.engine._reports import WallClock
from spmdzero.engine._schedule import require_metrics
from spmdzero.engine._step_end import StepEnd
from spmdzero.engine._work_count import count_work
from spmdzero.errors import SpmdZeroUsageError, UsageAssertionError
from spmdzero.state._still_placed import FrozenShards, naming_what_left
from spmdzero.state._training import Training
from spmdzero.step._numbers import loss_scale_number
from spmdzero.step._optimizer import ZeroOptimizer


class HostOutputs:
    """Hands each host its own rows of batches, and the same values of all other outputs.

    Args:
        across: moves values between the hosts.
        rules: which outputs are batches, and in which dim; None after a global forward, where all
            outputs are left as they are.
    """

    def __init__(self, across: Across, rules: RegionRules | None) -> None:
        self._across, self._rules = across, rules

    def __call__(self, output: Any) -> Any:
        """The global `output` as this host's script sees it."""
        return map_tensors(output, self._leave)

    def _leave(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not arrays.is_mine(tensor):
            return tensor
        rules = self._rules
        # Only a batch leaves the region with a dim, unless an output is declared.
        if rules and rules.outputs.get(path, "batch" if tensor.dim() else "mean") == "batch":
            return to_own_rows(tensor, rules.batch_dim, self._across)
        return keep_same(tensor, self._across)


# Largest number of backward passes without a step in one program if no accumulator is planned.
_MOST_PASSES = 4
_TRANSFORMED = (
    "engine(...) inside of torch.func.grad, vmap, jacrev or their like: it hands each device its "
    "rows, and what torch.func hands over has none. Take torch.autograd.grad(loss, x, "
    "create_graph=True) of what engine(x) returns, or call torch.func inside of the model's forward"
)


class ThreeCalls:
    """Trains by forward, backward and step; keeps watch of backward passes and of parameters."""

    def __init__(
        self,
        training: Training,
        *,
        accumulation: Accumulation,
        launching: Launching,
        capture: CapturedCalls,
        step_end: StepEnd,
        wall_clock: WallClock,
    ) -> None:
        self._training, self._accumulation, self._launching = training, accumulation, launching
        self._capture, self._step_end, self._wall_clock = capture, step_end, wall_clock
        self._frozen = FrozenShards(training)
        self._needs_scale = training.spmd_config.fp16.enabled and training.optimizer is not None
        self._watch = BackwardWatch(
            region=training.region,
            accumulation=accumulation.gradient_accumulation_steps,
            needs_scale=self._needs_scale,
            note_scaled=functools.partial(setattr, accumulation, "scaled", True),
            rules=training.placer.rules,
        )
        across = training.mesh.across
        rules = None if training.region is None else training.placer.rules
        self._host_outputs = None if across is None else HostOutputs(across, rules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on one micro-batch.

        Args:
            args, kwargs: the module's arguments. Tensors whose dim 0 has
                `train_micro_batch_size_per_gpu x local devices` rows are batches and are split over
                the devices, and so are the same inputs with fewer rows later; every other tensor
                goes to each device whole (`spmdzero.replicated(t)` marks a tensor that only looks
                like a batch). Tensors may be on the CPU or on `engine.device`.

        Returns the module's outputs as global tensors: batches with all rows (each of several hosts
        gets its own rows), floating scalars as their mean over the devices.

        Raises:
            SpmdZeroUsageError: no tensor among the inputs has the rows of a whole micro-batch, or
                of a short one after it (in evaluation on several hosts: rows that the devices can
                share equally); or torch.func traces the call.
            ReplicaRegionError: the module does something that can't be done per replica.
        """
        training = self._training
        if torch.is_autocast_enabled("cpu"):
            warn_of_cpus_autocast(user_line(otherwise="engine(...)"))
        if is_transforming():
            raise SpmdZeroUsageError(_TRANSFORMED)
        with held(), self._wall_clock.phase("fwd"), naming_what_left(training):
            current, lasting = training.current, training.gradients.outlive_programs
            if current.backward_done and (lasting or len(current.losses) >= _MOST_PASSES):
                # The caller goes on without the step that would have ended this micro-batch's
                # program. One program for all that follow would differ with their number.
                self.end_unstepped()
            return self.forward_placed(*self.place_inputs(args, kwargs))

    def place_inputs(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Places the inputs of a forward on the devices; frozen parameters are at rest then."""
        training = self._training
        if training.on_first_inputs is not None and self._trains():
            training.on_first_inputs(args, kwargs)
            training.on_first_inputs = None
        self._frozen.put_back()
        if training.spmd_config.fp16.auto_cast:
            args, kwargs = map_tensors((args, kwargs), lambda _, tensor: to_half(tensor))
        return training.placer(args, kwargs, training=training.module.training)

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self._training.module.training

    def forward_placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module on inputs that are on the devices."""
        training = self._training
        count_work(training, self._launching.programs, args, kwargs)
        self._launching.note_call(args, kwargs)
        records = torch.is_grad_enabled()
        if not records:
            training.start_unread()
        self._watch.keep_in_thread()
        if records:
            training.current.pass_forward()
        output = self._capture.forward(args, kwargs)
        output = self._watch.watch(output) if records else output
        return output if self._host_outputs is None else self._host_outputs(output)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulates the gradients of `loss`.

        Args:
            loss: a scalar that depends on an output of `engine(...)`, or a leaf with a hook that
                runs forwards and their own backward passes, as gradient caching has it. Each of
                several hosts has its own loss, and the gradients are those of the mean loss.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: whether to divide by `gradient_accumulation_steps`, so that the step uses
                the mean over micro-batches.

        Returns the loss that was differentiated: `loss / gradient_accumulation_steps`.

        Raises:
            UsageAssertionError: the loss is no scalar, or no forward of this engine made it.
        """
        training = self._training
        # A user who restarts an interrupted loop would otherwise add this micro-batch twice.
        with held(undo=training.restart_step), self._wall_clock.phase("bwd"):
            check_loss(loss)
            if self._needs_scale:
                # Otherwise gradients that were not scaled would join scaled ones.
                self._accumulation.collect_gradients()
            parts = training.batch.accumulation if scale_wrt_gas else 1
            if self._launching.observers:
                self._launching.summed = self._watch.sum_of_rows(loss)
            direct, scale = DirectPass.of(loss, training), self._loss_scale()
            step = training.counters.global_steps
            hooks = runs_forwards(loss)
            # A script may have computed the value that its hooks start from on the host.
            there = loss.detach().to(training.device) if hooks else loss
            detached, returned, gradient = training.health.watch(
                there, self._of_all(there), parts=parts, step=step, scale=scale
            )
            if not arrays.is_mine(loss):
                gradient = torch.full_like(loss, self._host_scale() / parts)
            with self._watch.by_hooks() if hooks else self._watch.by_engine(loss):
                if direct is None:
                    arrays.backward(loss, [gradient], retain_graph=retain_graph)
                else:
                    direct.run(gradient, retain_graph=retain_graph)
            self._accumulation.collect_gradients()
            self._accumulation.scaled = False
            training.current.pass_backward(detached, pending=True)
            training.counters.pass_backward()
            return returned

    def _of_all(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of the hosts' losses, which the hosts report."""
        across = self._training.mesh.across
        return loss if across is None else across.mean(loss.detach())

    def _backward_epilogue(self) -> None:
        """Does nothing: no work is left after a backward pass.

        DeepSpeed's page on training multiple models calls it after a `loss.backward()` through
        several engines.
        """

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for `engine.scale(loss).backward()`.

        Only fp16 has a scale other than 1. A plain backward is divided by
        `gradient_accumulation_steps` as `engine.backward` is.

        Raises:
            UsageAssertionError: the loss is no scalar or no forward made it, or no optimizer.
        """
        check_loss(loss)
        self._require_optimizer("scale")
        self._watch.expect_scaled()
        return self._times_loss_scale(loss)

    def _times_loss_scale(self, loss: torch.Tensor) -> torch.Tensor:
        scale = self._loss_scale()
        return loss if scale is None else loss * scale

    def _loss_scale(self) -> torch.Tensor | None:
        """fp16's loss scale, 0-dim; None without one."""
        optimizer = self._training.optimizer
        if optimizer is None or optimizer.scaler is None:
            return None
        # The scale is data: a Python number would need a new program after each change.
        return self._training.mesh.place(loss_scale_number(optimizer.scaler), waits=True)

    def _host_scale(self) -> float:
        optimizer = self._training.optimizer
        return 1.0 if optimizer is None else optimizer.loss_scale

    def _require_optimizer(self, call: str) -> ZeroOptimizer:
        if self._training.optimizer is None:
            raise UsageAssertionError(
                f"engine.{call}() without an optimizer: name one in the config "
                '("optimizer": {"type": "AdamW", ...}) or pass optimizer= to initialize'
            )
        return self._training.optimizer

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the gradient accumulation boundary, updates the parameters.

        It starts the compiled program on the devices; a TPU runs it while Python goes on, the CPU
        runtime may return only when it is done.

        Raises:
            SpmdZeroUsageError: no `backward` since the last step.
            UsageAssertionError: no optimizer, or inside `no_sync`.
            NonFiniteError: with `"spmd": {"check_finite": true}`, a loss or the gradient norm is
                not finite; parameters and states are as before, and the step restarts.
            SpmdZeroRuntimeError: an overflow at fp16's smallest loss scale; parameters and states
                are as before, and the step restarts.
            ReplicaRegionError, OutOfRangeError: an integer output or buffer differs between
                replicas, or an index is out of range, which is read now and then
                (`AgreementRhythm`); the micro-batch still counts.
        """
        training = self._training
        with held(), self._wall_clock.phase("step"):
            training.current.begin_end()
            self._accumulation.refuse_inside("step")
            optimizer = self._require_optimizer("step")
            self._accumulation.collect_gradients()
            self._accumulation.scaled = False
            if not training.current.backward_done and not training.gradients.waiting:
                raise SpmdZeroUsageError(
                    "engine.step() before engine.backward(loss): there is no gradient to use. Each "
                    "micro-batch is loss = engine(...); engine.backward(loss); engine.step()"
                )
            boundary = self._accumulation.step_is_boundary()
            # This may run Python of other engines' modules, so it comes before this step uses up
            # its gradients.
            keep_waiting(ending=training if boundary else None)
            if boundary:
                require_metrics(training.lr_scheduler, lr_kwargs or {})
            started = self._start_again_or_update(optimizer, boundary=boundary)
            # `explain` raises here, before the program is run; the step's gradients are used up.
            training.current.pass_launch()
            failure = None if started else self._launch("boundary" if boundary else "micro")
            self._step_end.end_micro_batch(boundary=boundary, lr_kwargs=lr_kwargs or {})
            if failure is not None:
                raise failure

    def _start_again_or_update(self, optimizer: ZeroOptimizer, *, boundary: bool) -> bool:
        """Returns whether a known program does it all; at a boundary records the update if not."""
        with self._restarts_if_it_fails():
            if self._capture.start_again(boundary=boundary):
                return True
            if boundary:
                optimizer.folds.wanted = self._capture.before_update()
                optimizer.step()
            return False

    @contextlib.contextmanager
    def _restarts_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Some gradients are used up already, and the rest would be half of a step.
            self._training.restart_step()
            raise

    def end_unstepped(self) -> None:
        """Starts the program of a micro-batch that no `step` ends."""
        keep_waiting(ending=None)
        with self._restarts_if_it_fails():
            started = self._capture.start_again(boundary=False)
        failure = None if started else self._launch("micro")
        self._training.current.pass_launch()
        if failure is not None:
            raise failure

    def _launch(self, kind: str) -> Exception | None:
        return self._launching.launch(kind, folded=self._capture.launching())
