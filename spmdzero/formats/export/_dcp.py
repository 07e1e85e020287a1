"""A training state in the format of `torch.distributed.checkpoint`, for FSDP and other trainers."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from spmdzero.formats._state import RESET_AT, StoredTensor, TrainingState
from spmdzero.formats.export._weights import Weights

_NOT_SLOTS = ("parameter", "buffer", "master", "accumulator")


def write_dcp(
    state: TrainingState,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    exclude: frozenset[str] = frozenset(),
) -> None:
    """Writes the state under the names of `torch.distributed.checkpoint.state_dict`.

    ``model.<name>`` are the weights, ``optim.state.<name>.<slot>`` the optimizer's states, and
    ``optim.param_groups`` its hyperparameters. `dcp.load` reads them into
    ``{"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}`` with
    `DefaultLoadPlanner(allow_partial_load=True)`, because torch's groups have further switches.
    Only one tensor is in memory at a time.

    Args:
        state: the state to write.
        folder: the target; created if need be.
        dtype, exclude: of the weights, as in `Weights.of`.

    Raises:
        OSError: no space, no permission, ...
    """
    weights = Weights.of(state, dtype=dtype, exclude=exclude)
    model = dict(weights.tensors) | {a: weights.tensors[name] for a, name in weights.tied.items()}
    held = {f"model.{name}": tensor for name, tensor in model.items()}
    states: dict[str, dict[str, Any]] = {}
    groups = state.host.param_groups or ()
    reset = {name: at for group in groups for name, at in group.get(RESET_AT, {}).items()}
    for key, tensor in state.tensors.items():
        slot, _, name = key.partition("/")
        if slot not in _NOT_SLOTS:
            step = torch.tensor(float(state.host.applied or 0) - reset.get(name, 0))
            states.setdefault(name, {"step": step})[slot] = _without_elements(tensor)
            held[f"optim.state.{name}.{slot}"] = tensor
    content: dict[str, Any] = {"model": {n: _without_elements(t) for n, t in model.items()}}
    if state.host.param_groups is not None:
        content["optim"] = {"state": states, "param_groups": state.host.param_groups}
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # torch warns that only one process saves, which is intended, and about its own code.
        warnings.filterwarnings("ignore", "torch.distributed is|TypedStorage is", UserWarning)
        dcp.save(
            content,
            storage_writer=dcp.FileSystemWriter(folder),
            planner=_ReadingPlanner(held),
            no_dist=True,
        )


def _without_elements(tensor: StoredTensor) -> torch.Tensor:
    # The write is planned by shapes; each tensor is read when its turn comes.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """Reads each tensor when its turn to be written comes."""

    def __init__(self, held: dict[str, StoredTensor]) -> None:
        super().__init__()
        self._held = held

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._held.get(index.fqn)
        return super().lookup_object(index) if tensor is None else tensor.whole()
