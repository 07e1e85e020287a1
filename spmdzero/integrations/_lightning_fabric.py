"""`Fabric(strategy="spmdzero")`: Fabric's DeepSpeed strategy with spmdzero's engine."""

from typing import Any

import torch
from lightning.fabric.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.fabric.utilities.seed import reset_seed

from spmdzero.integrations import _lightning_private as private
from spmdzero.integrations._initialize import ROWS, config_of_devices
from spmdzero.integrations._lightning_host import join, own_config, refuse_accelerator, register
from spmdzero.integrations._rows_of_devices import replicas_under


class SpmdZeroFabricStrategy(DeepSpeedStrategy):
    """Trains with an engine of spmdzero, on all devices of this host from one process.

    Arguments are those of Fabric's `DeepSpeedStrategy`. The number of rows of a batch, of all
    devices together, comes from the first loader that is set up, or from
    `train_micro_batch_size_per_gpu` in a config. Without a config nothing is clipped, as with the
    Trainer; with a config, DeepSpeed's default is `"gradient_clipping": 1.0`.
    """

    def __init__(self, *args: Any, config: Any = None, **kwargs: Any) -> None:
        private.require_release()
        super().__init__(*args, config=config, **kwargs)
        assert isinstance(self.config, dict)
        self._knows_rows = ROWS in self.config
        if own_config(config, self):
            self.config["gradient_clipping"] = 0.0

    @property
    def root_device(self) -> torch.device:
        """The CPU, where batches stay."""
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """The sampler's arguments; None for one process, which reads all rows in order."""
        return super().distributed_sampler_kwargs if self.world_size > 1 else None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this strategy as "spmdzero"."""
        register(strategy_registry, cls)

    def _configure_launcher(self) -> None:
        refuse_accelerator(self.accelerator, self.num_processes, of="Fabric")

    def setup_environment(self) -> None:
        """Sets up the processes without `DeepSpeedStrategy`'s check, which accepts only CUDA."""
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        join(self, self.config, of="Fabric")
        if not self._config_initialized:
            assert isinstance(self.config, dict)
            self.config.setdefault(ROWS, replicas_under(self.config))
            self._format_config()
            self._config_initialized = True

    def process_dataloader(self, dataloader: Any) -> Any:
        """Takes the number of rows of a batch from the first loader.

        Raises:
            SpmdZeroConfigError: the devices can't share the rows.
        """
        rows = getattr(dataloader, "batch_size", None)
        if rows is not None and not self._knows_rows:
            assert isinstance(self.config, dict)
            self._knows_rows, self.config[ROWS] = True, rows
            if self.model is not None:
                self.model.set_train_micro_batch_size(config_of_devices(self.config)[ROWS])
        return super().process_dataloader(dataloader)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Ends a micro-batch of the engine; the config decides which micro-batch ends a step.

        A closure runs once before that, as for torch's optimizers; its loss is returned.

        Raises:
            SpmdZeroUsageError: as in `Engine.step`.
        """
        closure = kwargs.get("closure")
        if closure is None:
            return self.model.step()
        with torch.enable_grad():
            loss = closure()
        self.model.step()
        return loss
