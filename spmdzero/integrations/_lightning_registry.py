"""Registers `strategy="spmdzero"` with Lightning, which has no entry points for strategies."""

from typing import Any

from lightning.fabric.accelerators import XLAAccelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.strategies import StrategyRegistry

from spmdzero.integrations._lightning_fabric import SpmdZeroFabricStrategy
from spmdzero.integrations._lightning_strategy import SpmdZeroStrategy
from spmdzero.integrations._replaced import in_place_of
from spmdzero.step._optimizer import ZeroOptimizer


def count_no_tpus() -> None:
    """Makes Lightning find no TPUs of its own: its one device is the CPU.

    It counts TPUs with torch_xla if that is installed, whatever accelerator is chosen, and a
    process that has imported torch_xla can't use the JAX backend any more.
    """

    @in_place_of(XLAAccelerator, "auto_device_count")
    def auto_device_count(*_: Any) -> int:
        return 0


def name_rates_by_the_scripts_optimizer() -> None:
    """Has `LearningRateMonitor` log `lr-SGD` for a script's SGD, as with DeepSpeed's optimizer.

    It names a rate by the class of the optimizer, and takes one that a schedule has as seen.
    """

    @in_place_of(LearningRateMonitor, "_find_names_from_optimizers")
    def find(original: Any, self: Any, optimizers: list[Any], *args: Any, **kwargs: Any) -> Any:
        named = [(isinstance(o, ZeroOptimizer) and o.given) or o for o in optimizers]
        return original(self, named, *args, **kwargs)


def register_strategies() -> None:
    """Registers the strategies with the Trainer and with Fabric."""
    SpmdZeroStrategy.register_strategies(StrategyRegistry)
    SpmdZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)
