"""The engine: DeepSpeed's forward / backward / step for a module that lives on a mesh."""

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from spmdzero.backend import runtime
from spmdzero.backend.pure import HOOKS
from spmdzero.engine._accumulation import Accumulation
from spmdzero.engine._captured import CapturedCalls
from spmdzero.engine._checkpoints import Checkpoints
from spmdzero.engine._direct_calls import DirectCalls
from spmdzero.engine._exports import Exports
from spmdzero.engine._kinds import KnownKinds
from spmdzero.engine._launching import Launching
from spmdzero.engine._module_methods import LoadsFollow, ModuleMethods
from spmdzero.engine._offers import offers
from spmdzero.engine._parameter import adopt_parameters
from spmdzero.engine._progress import Progress
from spmdzero.engine._reports import WallClock, reports
from spmdzero.engine._step_end import StepEnd
from spmdzero.engine._three_calls import ThreeCalls
from spmdzero.engine._train_batch import TrainBatch
from spmdzero.engine._uncompiled import uncompiled
from spmdzero.monitor import MonitorMaster
from spmdzero.state._counters import Counters
from spmdzero.state._training import Training
from spmdzero.step._optimizer import ZeroOptimizer

_SHARED = (
    "spmd_config plan mesh optimizer lr_scheduler training_dataloader device skipped_steps "
    "in_train_batch named_tensors attention"
)
_ACCUMULATION = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "set_train_batch_size set_train_micro_batch_size is_gradient_accumulation_boundary "
    "is_first_micro_batch set_gradient_accumulation_boundary no_sync coalesce_grad_reduction"
)

if TYPE_CHECKING:
    # Methods that `offers` adds, for type checkers and editors.
    class _Offered(
        ThreeCalls, TrainBatch, Accumulation, Launching, WallClock, Progress, ModuleMethods,
        Checkpoints, Exports, Training, Counters,
    ): ...  # fmt: skip
else:
    _Offered = object


@uncompiled("__call__ forward backward step train_batch")
@offers("_training", Training, _SHARED)
@offers("_calls", ThreeCalls, "forward backward scale step _backward_epilogue")
@offers("_accumulation", Accumulation, _ACCUMULATION)
@offers("_batches", TrainBatch)
@offers("_launching", Launching, "observe")
@offers("_wall_clock", WallClock, "get_wall_clock_timers")
@offers("_progress", Progress)
@offers("_training.counters", Counters, "global_steps micro_steps global_samples")
@offers("_module_methods", ModuleMethods)
@offers("_checkpoints", Checkpoints)
@offers("_exports", Exports)
@offers("_exports", Exports, "_zero3_consolidated_16bit_state_dict")
class Engine(nn.Module, _Offered):
    """Trains a module under a sharding plan, called as a DeepSpeedEngine is.

    `spmdzero.initialize` makes it. Its parts do the work and share a `Training`; unknown attributes
    are looked up in the module.

    Attributes:
        module: the user's module, its parameters on the devices.
        optimizer: a `ZeroOptimizer`, or None if neither the config nor the call named one.
        lr_scheduler: stepped at each gradient accumulation boundary.
        training_dataloader: the loader made from `training_data`.
        plan: where every tensor lives.
        device: the virtual device that stands for the mesh.
        audit, doctor: find faults of its steps; see `spmdzero.audit`, `spmdzero.doctor`.
        attention: how the latest forward computes attention, call by call; empty on the CPU unless
            ``"spmd": {"attention": "kernel"}``.
        explain: whether a step fits, what it moves, what it waits for; see `spmdzero.explain`.
        programs: a log of the compiled programs and of the reads from the devices so far.
        donated_inputs: kind of program -> number of inputs whose buffers the compiled program
            reuses.
        global_steps, micro_steps, global_samples: DeepSpeed's counters.
        capture: whether forwards run the model's Python, and why.
        flops_profiler: counts the operations of one step, if the config turns it on.
        monitor: writes scalars where the config says; `monitor.write_events` takes your own.
        after_step: functions that are called after each step.
    """

    flops_profiler: Any
    # Makes the optimizer of an engine of this class.
    optimizer_class: ClassVar[type[ZeroOptimizer]] = ZeroOptimizer
    # Whether the caller counts a batch's rows per process, as clients do.
    _rows_of_process: ClassVar[bool] = False

    def __init__(
        self, training: Training, *, client_optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        super().__init__()
        self.module = training.module
        config = training.spmd_config
        self._training = training
        self.client_optimizer = client_optimizer
        self.monitor = MonitorMaster(config, writes=runtime.process_index() == 0)
        self._progress = Progress(training)
        self._wall_clock = WallClock(training, self.monitor)
        self._launching = launching = Launching(training)
        launching.hooks = tuple(getattr(self, registry) for registry in HOOKS)
        self.programs, self.donated_inputs = launching.programs, launching.donated_inputs
        # With a global forward a direct call of the module needs no warning.
        noting = {"notes_forms": not self._rows_of_process}
        direct_calls = DirectCalls(training, **noting) if training.region is not None else None
        self._accumulation = accumulation = Accumulation(training, direct_calls)
        self._step_end = StepEnd(
            training, accumulation=accumulation, launching=launching, progress=self._progress
        )
        self.after_step = self._step_end.after_step
        kinds = KnownKinds(training, launching)
        self.capture = CapturedCalls(training, launching, kinds)
        self._calls = ThreeCalls(
            training,
            accumulation=accumulation,
            launching=launching,
            capture=self.capture,
            step_end=self._step_end,
            wall_clock=self._wall_clock,
        )
        self._batches = TrainBatch(
            training,
            accumulation=accumulation,
            calls=self._calls,
            # Through the engine itself, so that its hooks run around the forward.
            forward=weakref.proxy(self),
        )
        self._checkpoints = Checkpoints(training, accumulation)
        self._exports = Exports(training, accumulation)
        self._module_methods = ModuleMethods(training)
        adopt_parameters(training, accumulation)
        LoadsFollow(training.optimizer).watch(training.module)
        if direct_calls is not None:
            direct_calls.watch(training.module, backwards=config.fp16.enabled)
        self.after_step += reports(training, self._progress, self.monitor)
        launching.launch_states()

    @property
    def config(self) -> dict[str, Any]:
        """The config as the user wrote it."""
        return self._training.spmd_config.source

    def gradient_clipping(self) -> float:
        """The largest allowed global gradient norm, 0 for no clipping."""
        return self._training.spmd_config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self._training.plan.stage

    def train(self, mode: bool = True) -> "Engine":
        """Puts the module into training (or evaluation) mode."""
        self.training = mode
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """Puts the module into evaluation mode."""
        return self.train(False)

    def retrace(self) -> None:
        """Makes every kind of micro-batch be traced once more, and compared with its program.

        It is for code whose path depends on something that spmdzero can't see: a global variable,
        the time, a file.
        """
        self.capture.check()

    def destroy(self) -> None:
        """Waits for the asynchronous save under way and for the devices.

        Buffers are freed when the engine's last reference goes.

        Raises:
            SpmdZeroCheckpointError: the save failed.
        """
        self._checkpoints.wait_checkpoint()
        runtime.wait()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" in self._modules and hasattr(self._modules["module"], name):
                return getattr(self._modules["module"], name)
            raise
