"""The worker process of `spmdzero explain` with the devices: python -m, with two JSON paths."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from spmdzero.backend import choose
from spmdzero.cli._arguments import made_by, make_batch
from spmdzero.config import backend_of, read, set_keys
from spmdzero.errors import SpmdZeroError
from spmdzero.explain import Explanation, WaitingError, _passes, explain
from spmdzero.integrations._install import refuse_other_backends


def main(asked: str, answered: str) -> None:
    """Reads the request from the first file, and writes the explanation to the second file."""
    try:
        explanation = _explain(json.loads(Path(asked).read_text()))
    except WaitingError:
        sys.exit(_passes.WAITING)
    except SpmdZeroError as error:
        sys.exit(f"spmdzero explain: {error}")
    Path(answered).write_text(explanation.to_json())


def _explain(request: dict[str, Any]) -> Explanation:
    config = set_keys(read(request["config"]), request["settings"])
    if choose(backend_of(config)).name == "jax":
        # Otherwise transformers imports torch_xla, and then JAX's backend doesn't start.
        refuse_other_backends()
    with torch.device("meta" if request["meta"] else "cpu"):
        model = made_by(request["model"])
    batch = make_batch(request["batch"])
    told = {name: request[name] for name in ("tpu", "stages", "host_rate")}
    return explain(model, config, batch, **told)


if __name__ == "__main__":
    main(*sys.argv[1:])
