"""A process that measures: `python -m harness.child MODULE '{...}' answer.json`.

Calls the module's `measure` with the order. A process of its own, because torch_xla and jax fix the
number of devices at the first access.
"""

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    module, order, answer = sys.argv[1:]
    measured = importlib.import_module(module).measure(**json.loads(order))
    Path(answer).write_text(json.dumps(measured))
