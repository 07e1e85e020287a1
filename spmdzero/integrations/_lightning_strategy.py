"""`Trainer(strategy="spmdzero")`: Lightning's DeepSpeed strategy with spmdzero's engine."""

import contextlib
import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from spmdzero.backend import map_tensors
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations import _lightning_private as private
from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._deferred import DeferredTensor
from spmdzero.integrations._initialize import ROWS, initialize_for_client
from spmdzero.integrations._lightning_host import join, own_config, refuse_accelerator, register
from spmdzero.integrations._lightning_steps import LightningSteps, values_in
from spmdzero.integrations._rows_of_devices import replicas_under


class SpmdZeroStrategy(DeepSpeedStrategy):
    """Trains with an engine of spmdzero, on all devices of this host from one process.

    Arguments are those of Lightning's `DeepSpeedStrategy`: `stage`, `config`, `loss_scale` and so
    on. Lightning sees one device, the CPU, where batches stay: the engine uploads each device its
    rows. A loader's `batch_size` counts the rows of all devices together.

    A step of gradient accumulation ends as without a strategy: after `accumulate_grad_batches`
    batches, and with the last batch of an epoch.
    """

    strategy_name = "spmdzero"

    def __init__(self, *args: Any, config: Any = None, **kwargs: Any) -> None:
        private.require_release()
        super().__init__(*args, config=config, **kwargs)
        own_config(config, self)
        self._told_rows = isinstance(self.config, dict) and ROWS in self.config
        self._steps: LightningSteps | None = None
        # The module's tensors on the devices, kept after `teardown` has moved the module to the
        # CPU.
        self._placed: list[tuple[dict[str, Any], str, Any]] = []

    @property
    def root_device(self) -> torch.device:
        """The CPU, where batches stay."""
        return torch.device("cpu")

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning decides where a step ends, and tells the engine."""
        return False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this strategy as "spmdzero"."""
        register(strategy_registry, cls)

    def _configure_launcher(self) -> None:
        refuse_accelerator(self.accelerator, self.num_processes, of="Trainer")

    def setup_environment(self) -> None:
        """Sets up the processes without `DeepSpeedStrategy`'s check, which accepts only CUDA."""
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Connects the processes of all hosts."""
        reset_seed()
        self.set_world_ranks()
        join(self, self.config, of="Trainer")

    def setup(self, trainer: Trainer) -> None:
        """Makes the engine.

        Raises:
            SpmdZeroUsageError: the user asks for manual optimization or `sync_batchnorm`, which an
                engine doesn't support.
        """
        module = self.lightning_module
        assert module is not None
        fits = trainer.state.fn == TrainerFn.FITTING
        self._refuse(module, fits=fits)
        if self.world_size == 1:
            private.keep_samplers(trainer)
            # The process has all rows; its process group only answers code that asks for one.
            warnings.filterwarnings("ignore", "It is recommended to use `self.log.*sync_dist=True")
        self._steps, self._placed = None, []
        if fits and not self._told_rows and self._config_initialized:
            # The config may have the rows of an evaluation, or of an earlier loader.
            assert isinstance(self.config, dict)
            self.config[ROWS] = self._auto_select_batch_size()
        super().setup(trainer)
        assert isinstance(self.model, ClientEngine)
        self._steps = LightningSteps(module, trainer, self.model)

    def _refuse(self, module: LightningModule, *, fits: bool) -> None:
        if fits and not module.automatic_optimization:
            raise SpmdZeroUsageError(
                "automatic_optimization = False: training_step runs inside of the engine's "
                "forward, where there is nothing to step. Leave the optimization to the Trainer, "
                'or write the loop with lightning.fabric: Fabric(strategy="spmdzero")'
            )
        if self._layer_sync is not None:
            raise SpmdZeroUsageError(
                "Trainer(sync_batchnorm=True): a batch norm sees the rows of one device, as under "
                'DeepSpeed. Leave it out, or set "spmd": {"forward": "global"} in the config, with '
                "which it sees all rows"
            )

    def _auto_select_batch_size(self) -> int:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            # There is no training loader, and an evaluated batch may have any number of rows.
            return replicas_under(self.config or {})
        rows = private.rows_of_loader(trainer)
        if rows is None:
            raise SpmdZeroUsageError(
                "how many rows does a batch have? The train dataloader has no batch_size. Say it: "
                f'SpmdZeroStrategy(config={{..., "{ROWS}": rows of a batch}})'
            )
        return rows

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        assert isinstance(self.config, dict)
        # Below stage 3 an evaluation has no shards.
        names = (
            "fp16",
            "bf16",
            "spmd",
            "tensor_parallel",
            *(("zero_optimization",) if self.zero_stage_3 else ()),
        )
        kept = {key: self.config[key] for key in names if key in self.config}
        # In evaluation mode any number of rows is allowed.
        config = {ROWS: replicas_under(kept), **kept}
        self.model, *_ = initialize_for_client(config=config, model=model)

    def model_to_device(self) -> None:
        """Does nothing: the engine has put the module on the devices."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `training_step` in the engine's forward; its log calls are made after the start."""
        return self._call_step("training_step", *args, later=True, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `validation_step` in the engine's forward."""
        return self._call_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `test_step` in the engine's forward."""
        return self._call_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `predict_step` in the engine's forward."""
        return self._call_step("predict_step", *args, **kwargs)

    def _call_step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self._steps is not None
        return self._steps(method, *args, **kwargs)

    def block_backward_sync(self) -> Any:
        """Does nothing: the plan decides where gradients are reduced."""
        return contextlib.nullcontext()

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Accumulates gradients; ends the micro-batch, unless `optimizer_step` will end it.

        Lightning has already divided the loss by `accumulate_grad_batches`, and DeepSpeed's engine
        would divide it again.
        """
        assert self.lightning_module is not None
        assert self._steps is not None
        engine, trainer = self.deepspeed_engine, self.lightning_module.trainer
        loss = super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
        if engine.gradient_accumulation_steps() > 1:
            ends = private.ends_step(trainer)
            engine.set_gradient_accumulation_boundary(ends)
            if not ends:
                engine.step()
                self._steps.finish()
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the last micro-batch of a step, and ends the step."""
        result = super().optimizer_step(*args, **kwargs)
        if self._steps is not None:
            self._steps.finish()
        return result

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves the checkpoint as a folder, as `DeepSpeedStrategy` does."""
        read = map_tensors(
            checkpoint, lambda _, t: t.read() if isinstance(t, DeferredTensor) else t
        )
        with values_in(self._placed):
            super().save_checkpoint(read, filepath, storage_options)

    def teardown(self) -> None:
        """Moves the module's parameters to the CPU; keeps those on the devices for a later save."""
        module, optimizers = self.lightning_module, self.optimizers
        if module is not None and self._steps is not None:
            self._placed = private.tensors_of(module)
        self.optimizers = []
        super().teardown()
        private.tie_as(self._placed)
        self.optimizers = optimizers
