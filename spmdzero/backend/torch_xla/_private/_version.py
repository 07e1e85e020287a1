"""The one version of torch_xla whose private calls are used here."""

import torch_xla

from spmdzero.errors import SpmdZeroRuntimeError

TESTED_VERSION = "2.9.0"

if torch_xla.__version__.split("+")[0] != TESTED_VERSION:
    raise SpmdZeroRuntimeError(
        f"torch_xla {torch_xla.__version__} is installed, spmdzero is built on the private calls "
        f"of {TESTED_VERSION}. Install it: pip install torch=={TESTED_VERSION} "
        f"torch_xla=={TESTED_VERSION}"
    )
