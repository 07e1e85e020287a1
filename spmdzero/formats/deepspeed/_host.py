"""DeepSpeed's counters, loss scaler and param groups as a `HostState`, and back."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._state import HostState
from spmdzero.formats.deepspeed._pickles import DamagedFile
from spmdzero.formats.deepspeed._stand_ins import DynamicLossScaler, LossScaler

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# What DeepSpeed takes for itself; the rest of the model file goes to the caller
# (DeepSpeed, runtime/engine.py, `_load_checkpoint`).
_TAKEN = (
    *("module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size"),
    *("data_sampler", "random_ltd", "lr_scheduler", "optimizer"),
)
# Choices between a torch optimizer's implementations, which say nothing about the numbers.
_SWITCHES = ("foreach", "fused", "capturable", "params", "step", "param_names")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerFile:
    """What an optimizer's file says beside its tensors.

    Attributes:
        groups: the numbers of each param group, with the names of its parameters.
        steps: the step that each parameter's state counts, 0-dim or a number.
        scaler: the loss scale, as DeepSpeed pickles it or as a dict of it; None for none.
    """

    groups: list[dict[str, Any]]
    steps: Mapping[str, Any]
    scaler: Any = None


def host_state(
    model: Mapping[str, Any],
    found: OptimizerFile | None,
    *,
    file: Path,
    extra: Mapping[str, Any],
    tied: Mapping[str, str],
) -> HostState:
    """The host's side of a checkpoint.

    Args:
        model: the contents of the model file.
        found: those of the optimizer's files, None where there are none.
        file: the model file, for messages.
        extra, tied: as in `HostState`.

    Raises:
        DamagedFile: parameters were updated different numbers of times.
    """
    client_state = {key: _own(value) for key, value in model.items() if key not in _TAKEN}
    if model.get("optimizer") is not None:
        client_state["optimizer"] = _own(model["optimizer"])
    return HostState(
        counters={key: int(model[key]) for key in COUNTERS if key in model},
        applied=_applied(found.steps, file) if found else None,
        skipped=int(model.get("skipped_steps", 0)),
        param_groups=found.groups if found else None,
        scheduler=model.get("lr_scheduler"),
        scaler=_scaler(found.scaler) if found else None,
        extra=extra,
        client_state=client_state,
        tied=tied,
    )


def _own(value: Any) -> Any:
    """The same, with copies of its tensors: the caller's must outlive the mapped file."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, _own(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_own(item) for item in value)
    return value


def numbers(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A torch param group with the names of its parameters, without switches of implementation."""
    kept = {key: value for key, value in group.items() if key not in _SWITCHES}
    return kept | {"params": list(names)}


def loss_scaler(scaler: Mapping[str, Any] | None) -> LossScaler | DynamicLossScaler:
    """What DeepSpeed pickles for `HostState.scaler`; a scale of 1 where there is none."""
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
        raise DamagedFile(
            file=file,
            reason=f"its parameters were updated different numbers of times, {sorted(counts)} "
            f"(least: {', '.join(few)})",
            fix="spmdzero counts the updates of all parameters together. Load with "
            "load_optimizer_states=False",
        )
    return counts.pop() if counts else None


def scalar(value: Any) -> bool:
    """Whether an optimizer state is one number: a Python number or a tensor of one element."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0
