"""`Fabric(strategy="spmdzero")`: Fabric's DeepSpeed strategy with spmdzero's engine."""

from typing import Any

import torch
from lightning.fabric.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.fabric.utilities.seed import reset_seed

from spmdzero.integrations._lightning_host import join, refuse_accelerator


class SpmdZeroFabricStrategy(DeepSpeedStrategy):
    """Trains with an engine of spmdzero's, on all devices of this host from one process.

    Arguments are those of Fabric's `DeepSpeedStrategy`. `train_micro_batch_size_per_gpu` in its
    config is the rows of a batch, of all devices together.
    """

    @property
    def root_device(self) -> torch.device:
        """Where batches go: they stay."""
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None for one process, which reads all rows in the loader's own order."""
        return super().distributed_sampler_kwargs if self.world_size > 1 else None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes the name known."""
        strategy_registry.register(
            "spmdzero", cls, description="ZeRO-1/2 on all devices, by spmdzero", override=True
        )

    def _configure_launcher(self) -> None:
        refuse_accelerator(self.accelerator, self.num_processes, of="Fabric")

    def setup_environment(self) -> None:
        """As `DeepSpeedStrategy`, which would refuse every accelerator but CUDA."""
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        join(self.world_size)
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True
