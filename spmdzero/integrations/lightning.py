"""Lightning: `Trainer(accelerator="cpu", strategy="spmdzero")`, and the same of Fabric.

Importing this module, before `lightning`, makes that name known. So does
`spmdzero.integrations.install`, which it calls: Lightning's own DeepSpeed strategies, which these
are, look for the package `deepspeed`.
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

# The strategies import Lightning, which has to find that package.
import lightning  # noqa: F401

from spmdzero.integrations._lightning_fabric import SpmdZeroFabricStrategy
from spmdzero.integrations._lightning_strategy import SpmdZeroStrategy

__all__ = ["SpmdZeroFabricStrategy", "SpmdZeroStrategy"]
