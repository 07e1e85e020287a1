"""`DeepSpeedEngine`: an engine with the names of DeepSpeed's that it could do without."""

from typing import TYPE_CHECKING, Any

import torch

from spmdzero.compat.getters import ConfigGetters, DeepSpeedConfigNames
from spmdzero.compat.optimizer import DeepSpeedOptimizer
from spmdzero.compat.refusals import raise_if_refused, refused_methods
from spmdzero.engine import Engine, offers
from spmdzero.state._training import Training

if TYPE_CHECKING:
    # Methods that `offers` and the table of refusals add, for type checkers and editors.
    class _Names(ConfigGetters): ...
else:
    _Names = refused_methods("DeepSpeedEngine")


@offers("_getters", ConfigGetters)
class DeepSpeedEngine(Engine, _Names):
    """An `Engine` with DeepSpeed's getters, which refuses what DeepSpeed's has and this has not.

    `spmdzero.initialize` makes it.
    """

    optimizer_class = DeepSpeedOptimizer

    def __init__(
        self, training: Training, *, client_optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        super().__init__(training, client_optimizer=client_optimizer)
        self._getters = ConfigGetters(
            config=training.spmd_config,
            batch=lambda: training.batch,
            plan=training.plan,
            optimizer=training.optimizer,
            client_optimizer=client_optimizer,
        )

    @property
    def _config(self) -> DeepSpeedConfigNames:
        # Scripts read DeepSpeed's checked config under this name.
        return DeepSpeedConfigNames(self._training.spmd_config, self._training.batch)

    @property
    def basic_optimizer(self) -> Any:
        """The same optimizer as `optimizer`: no optimizer wraps another one here."""
        return self._training.optimizer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise_if_refused("engine", name)
            raise
