"""Lightning: `Trainer(accelerator="cpu", strategy="spmdzero")`, and the same of Fabric.

Importing this module is what makes the name known: Lightning has no entry points for strategies.
It calls `spmdzero.integrations.install`.
"""

from spmdzero.integrations._install import install

install()

# Lightning's own strategy looks for the package `deepspeed`, which is there from here on.
from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from spmdzero.integrations import _lightning_private as _private  # noqa: E402
from spmdzero.integrations._lightning_fabric import SpmdZeroFabricStrategy  # noqa: E402
from spmdzero.integrations._lightning_strategy import SpmdZeroStrategy  # noqa: E402

__all__ = ["SpmdZeroFabricStrategy", "SpmdZeroStrategy"]

_private.require_release()
SpmdZeroStrategy.register_strategies(StrategyRegistry)
SpmdZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)
