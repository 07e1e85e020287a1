"""Where Lightning looks for `strategy="spmdzero"`: it has no entry points for strategies."""

from typing import Any

from lightning.fabric.accelerators import XLAAccelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from spmdzero.integrations._lightning_fabric import SpmdZeroFabricStrategy
from spmdzero.integrations._lightning_strategy import SpmdZeroStrategy
from spmdzero.integrations._replaced import in_place_of


def count_no_tpus() -> None:
    """Has Lightning find no TPUs of its own: its one device is the CPU.

    It counts them by torch_xla wherever that is installed, whichever accelerator it is told, and
    a process in which torch_xla is imported can't have the JAX backend any more.
    """

    @in_place_of(XLAAccelerator, "auto_device_count")
    def auto_device_count(*_: Any) -> int:
        return 0


def register_strategies() -> None:
    """Makes the name known to the Trainer and to Fabric."""
    SpmdZeroStrategy.register_strategies(StrategyRegistry)
    SpmdZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)
