"""Runs a stack's command by spmdzero and by plain torch, and reads what its trainer has logged."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEVICES = 2
_BIN = Path(sys.executable).parent
# What this process's tests have set, and what a launcher would.
_LEFT = (
    "PJRT_DEVICE", "CPU_NUM_DEVICES", "SPMDZERO_BACKEND", "SPMDZERO_STACK", "RANK", "LOCAL_RANK",
    "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST", "XLA_FLAGS",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended well.

    Attributes:
        said: what it printed, stdout and stderr together.
    """

    said: str


class FailedError(AssertionError):
    """A command that ended with another status than was asked for; says what it printed."""


def by_spmdzero(
    words: Sequence[str], *, cwd: Path, devices: int = DEVICES, status: int = 0, **variables: str
) -> Ended:
    """Runs `spmdzero run --devices N WORDS...` on virtual CPU devices with the JAX backend.

    Args:
        words: a command of the stack's environment and its arguments.
        status: how it has to end.
        variables: of the environment, besides.
    """
    start = [str(_BIN / "spmdzero"), "run", "--devices", str(devices)]
    return _run([*start, *words], cwd, status, {"SPMDZERO_BACKEND": "jax", **variables})


def by_torch(words: Sequence[str], *, cwd: Path, **variables: str) -> Ended:
    """Runs the same command by plain torch, in one process, on the CPU."""
    return _run([str(_BIN / words[0]), *words[1:]], cwd, 0, variables)


def _run(words: list[str], cwd: Path, status: int, variables: dict[str, str]) -> Ended:
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT}
    path = {"PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        words, cwd=cwd, env=kept | path | variables, text=True, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if ended.returncode != status:
        raise FailedError(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stdout}")
    return Ended(ended.stdout)


def logged(folder: Path, key: str = "loss") -> list[float]:
    """What a Trainer has logged under `key`, by its newest `trainer_state.json` in `folder`."""
    files = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history: list[dict[str, Any]] = json.loads(files[-1].read_text())["log_history"]
    return [entry[key] for entry in history if key in entry]


def assert_merged(model: Path, adapter: Path, merged: Path) -> None:
    """Checks that the folder `merged` has a model with the logits of `model` with its `adapter`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.arange(6, 40)[None]
    with torch.no_grad():
        before = base(ids).logits
        wanted = PeftModel.from_pretrained(base, adapter).eval()(ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
    # fp32, with one matrix in the place of three.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)
