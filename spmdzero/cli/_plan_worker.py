"""The worker process of `spmdzero plan` with a slice's devices: python -m, with two JSON paths."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from spmdzero.backend import choose
from spmdzero.cli._arguments import made_by, make_batch
from spmdzero.config import backend_of, read, set_keys
from spmdzero.errors import SpmdZeroError, SpmdZeroUsageError
from spmdzero.integrations._install import refuse_other_backends
from spmdzero.search import TrainingPlan, plan_for


def main(asked: str, answered: str) -> None:
    """Reads the request from the first file, and writes the plan to the second file."""
    try:
        plan = _plan(json.loads(Path(asked).read_text()))
    except SpmdZeroError as error:
        sys.exit(f"spmdzero plan: {error}")
    except KeyboardInterrupt:
        sys.exit("spmdzero plan: interrupted before anything was compiled")
    Path(answered).write_text(plan.to_json())


def _plan(request: dict[str, Any]) -> TrainingPlan:
    config = set_keys(read(request["config"]), request["settings"])
    if choose(backend_of(config)).name == "jax":
        # Otherwise transformers imports torch_xla, and then JAX's backend doesn't start.
        refuse_other_backends()
    told = {name: request[name] for name in ("tpu", "global_batch", "tokens", "price", "programs")}
    return plan_for(_model(request["model"]), config, make_batch(request["batch"]), **told)


def _model(name: str) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            return made_by(name)
    except SpmdZeroError:
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpmdZeroUsageError(
            f"{name} can't be built on the meta device, where tensors have shapes and no values: "
            f"{said}. Read no value of a tensor, and no weights from disk, while the model is built"
        ) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
