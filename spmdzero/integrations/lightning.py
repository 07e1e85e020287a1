"""Lightning: `Trainer(accelerator="cpu", strategy="spmdzero")`, and the same for Fabric.

Importing this module before `lightning` registers the strategy. So does
`spmdzero.integrations.install`, which this module calls: the strategies are subclasses of
Lightning's DeepSpeed strategies, which look for the package `deepspeed`.
"""

import sys

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._install import install

try:
    install()
except SpmdZeroUsageError as error:
    if "lightning" not in sys.modules:
        raise
    raise SpmdZeroUsageError(
        "import spmdzero.integrations.lightning before `import lightning`, which imports others: "
        f"{error}"
    ) from error

# The strategies import Lightning, which has to find the package `deepspeed`.
import lightning  # noqa: F401

from spmdzero.integrations._lightning_fabric import SpmdZeroFabricStrategy
from spmdzero.integrations._lightning_strategy import SpmdZeroStrategy

__all__ = ["SpmdZeroFabricStrategy", "SpmdZeroStrategy"]
