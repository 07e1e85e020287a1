"""Where Lightning looks for `strategy="spmdzero"`: it has no entry points for strategies."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from spmdzero.integrations._lightning_fabric import SpmdZeroFabricStrategy
from spmdzero.integrations._lightning_strategy import SpmdZeroStrategy


def register_strategies() -> None:
    """Makes the name known to the Trainer and to Fabric."""
    SpmdZeroStrategy.register_strategies(StrategyRegistry)
    SpmdZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)
