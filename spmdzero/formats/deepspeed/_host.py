"""Converts DeepSpeed's counters, loss scaler and param groups to a `HostState`, and back."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdzero.formats._state import HostState
from spmdzero.formats.deepspeed._model_file import ModelFile
from spmdzero.formats.deepspeed._optimizer import SavedOptimizer
from spmdzero.formats.deepspeed._pickled_classes import DynamicLossScaler, LossScaler
from spmdzero.formats.deepspeed._pickles import damaged

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Keys that DeepSpeed uses itself; the rest of the model file goes to the caller
# (DeepSpeed, runtime/engine.py, `_load_checkpoint`).
_TAKEN = (
    *("module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size"),
    *("data_sampler", "random_ltd", "lr_scheduler", "optimizer"),
)


def host_state(model: ModelFile, found: SavedOptimizer | None) -> HostState:
    """The host state of a checkpoint.

    Args:
        model: the model's file.
        found: the contents of the optimizer's files, None where there are none.

    Raises:
        SpmdZeroCheckpointError: parameters were updated different numbers of times.
    """
    content = model.content
    client_state = {key: value for key, value in content.items() if key not in _TAKEN}
    if content.get("optimizer") is not None:
        client_state["optimizer"] = content["optimizer"]
    return HostState(
        counters={key: int(content[key]) for key in COUNTERS if key in content},
        applied=_applied(found.steps, model.path) if found else None,
        skipped=int(content.get("skipped_steps", 0)),
        param_groups=found.groups if found else None,
        scheduler=content.get("lr_scheduler"),
        scaler=_scaler(found.scaler) if found else None,
        extra=model.extra,
        # Copy it: the caller's tensors must outlive the mapped file.
        client_state=copy.deepcopy(client_state),
        tied=model.tied,
    )


def loss_scaler(scaler: Mapping[str, Any] | None) -> LossScaler | DynamicLossScaler:
    """DeepSpeed's pickled object for `HostState.scaler`; with a scale of 1 where that is None."""
    if not scaler or not scaler.get("dynamic"):
        return LossScaler(cur_scale=float(scaler["cur_scale"]) if scaler else 1.0)
    fields = {field.name for field in dataclasses.fields(DynamicLossScaler)}
    return DynamicLossScaler(**{k: v for k, v in scaler.items() if k in fields})


def _scaler(scaler: Any) -> dict[str, Any] | None:
    if scaler is None:
        return None
    values = scaler if isinstance(scaler, Mapping) else vars(scaler)
    known = {field.name for field in dataclasses.fields(DynamicLossScaler)} - {
        *("dtype", "scale_factor", "raise_error_at_min_scale")
    }
    return {key: value for key, value in values.items() if key in known}


def _applied(steps: Mapping[str, Any], file: Path) -> int | None:
    counts = {int(step) for step in steps.values()}
    if len(counts) > 1:
        few = {name: int(step) for name, step in steps.items() if int(step) == min(counts)}
        raise damaged(
            file,
            f"its parameters were updated different numbers of times, {sorted(counts)} "
            f"(least: {', '.join(few)})",
            "spmdzero counts the updates of all parameters together. Load with "
            "load_optimizer_states=False",
        )
    return counts.pop() if counts else None
