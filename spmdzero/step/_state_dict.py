"""An optimizer's states in torch's form: whole tensors of the host, by parameter number."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmdzero._names import listed
from spmdzero.backend import arrays, runtime
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule
from spmdzero.step._loss_scale import LossScaled
from spmdzero.step._numbers import take_over_numbers
from spmdzero.step._state import State
from spmdzero.step._states import LastingState
from spmdzero.step._torch_calls import PlannedOptimizer

_STEP, _SCALER = "step", "loss_scaler"
"""The count of updates in each parameter's state, as torch has it; fp16's scale beside `state`."""

_Saved = Mapping[str, Any]


class WholeStates(LossScaled, LastingState, PlannedOptimizer):
    """An optimizer of shards whose state dict is of whole tensors on the host.

    It is read and written as a checkpoint is: torch's own would round masters and moments to the
    parameter's dtype, give each device all of them, and forget the count of updates.
    """

    _rules: Sequence[UpdateRule]
    _held: State

    def _trainable(self) -> Iterable[nn.Parameter]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The states in torch's form, whole and on the CPU, whatever the mesh.

        As torch's, with the fp32 ``"master"`` of a 16-bit parameter among its states, the count
        of updates as each one's ``"step"``, and fp16's scale as ``"loss_scaler"``. On several
        hosts all call it: each gets all of every tensor. Hooks of torch's run before and after.
        """
        return self._saved_between_hooks(self._whole)

    @torch.no_grad()
    def _whole(self) -> dict[str, Any]:
        self.renew()
        members = [p for group in self.param_groups for p in group["params"]]
        number_of = {parameter: number for number, parameter in enumerate(members)}
        count, names = self._held["counter/applied"].detach().cpu(), self._held.names
        groups = [
            group | {"params": [number_of[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        states = {
            number_of[parameter]: {_STEP: count - self.reset_at.get(names[parameter], 0)}
            | {
                slot: _on_host(tensor, self._own_shape(parameter, slot))
                for slot, tensor in self.state[parameter].items()
            }
            for parameter in self._trainable()
        }
        scaler = self.scaler
        packed = {"state": states, "param_groups": groups}
        return packed | ({_SCALER: dataclasses.asdict(scaler)} if scaler is not None else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Takes over what `state_dict` returned, of this engine or of any mesh, or torch's own.

        Each device gets its part, in the dtype that it keeps. A parameter without a saved state
        starts anew; one without a saved master keeps the one that it has. The numbers of the
        param groups are the saved ones, as in torch. Everything is checked before it changes.
        Hooks of torch's run before and after.

        Raises:
            SpmdZeroUsageError: it is of other param groups or of another optimizer.
        """
        self._loaded_between_hooks(state_dict, self._take_over)

    @torch.no_grad()
    def _take_over(self, state_dict: Mapping[str, Any]) -> None:
        self.renew()
        names, applied = self._held.names, self._held["counter/applied"]
        ordered = [[names[p] for p in group["params"]] for group in self.param_groups]
        states, groups = _states_by_name(state_dict, ordered)
        members = {names[parameter]: parameter for parameter in self._trainable()}
        states = {name: state for name, state in states.items() if name in members}
        counts = {name: int(state[_STEP]) for name, state in states.items() if _STEP in state}
        if counts:
            count = max(counts.values())
        else:
            # torch's SGD doesn't count; the first update is another one than those that follow.
            count = max(1, int(applied.item())) if any(states.values()) else 0
        for name, state in states.items():
            parameter = members[name]
            shapes = {slot: self._own_shape(parameter, slot) for slot in self.state[parameter]}
            _require_fits(name, state, shapes, beside=("master", _STEP))
        # Where a tensor's parts are is known once it is there.
        runtime.sync()
        runtime.wait()
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            for parameter in group["params"]:
                new = states.get(names[parameter])
                for slot, stored in self.state.get(parameter, {}).items():
                    if new is None and slot != "master":
                        self._fill(stored, torch.full(stored.shape, rule.initial(slot, group)))
                    elif new is not None and slot in new:
                        self._fill(stored, new[slot])
        self._fill(applied, count)
        self.reset_at.clear()
        if counts:
            self.reset_at.update(
                {n: count - counts.get(n, 0) for n in members if counts.get(n, 0) < count}
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            take_over_numbers(group, saved)
        if self.scaler is not None and _SCALER in state_dict:
            self.scaler.load(state_dict[_SCALER])
        runtime.sync()
        runtime.wait()

    def _own_shape(self, parameter: torch.Tensor, slot: str) -> tuple[int, ...]:
        return self._held.plan.at_rest(f"{slot}/{self._held.names[parameter]}").shape

    def _fill(self, stored: torch.Tensor, value: Any) -> None:
        self._held.mesh.overwrite(stored, _device_parts(stored, torch.as_tensor(value)))


def _on_host(stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What the devices hold in parts, padded perhaps: `[*shape]` on the CPU."""
    whole = arrays.read(stored.detach())
    if tuple(whole.shape) == shape:
        return whole.clone()
    return whole[: math.prod(shape)].reshape(shape).clone()


def _device_parts(stored: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
    """Of a value of the host what each local device is to hold, in the form of `stored`."""
    whole = whole.detach().cpu().to(stored.dtype)
    if whole.shape != stored.shape:
        whole = F.pad(whole.reshape(-1), (0, stored.numel() - whole.numel()))
    return [whole[part].contiguous() for part in arrays.local_slices(stored)]


def _states_by_name(
    saved: object, names: Sequence[Sequence[str]]
) -> tuple[dict[str, _Saved], list[_Saved]]:
    """The states by parameter name, and the param groups, of what `state_dict` returned.

    Args:
        saved: the state dict.
        names: of the parameters in each of the optimizer's param groups, which have the order of
            the saved numbers, as in torch.

    Raises:
        SpmdZeroUsageError: it is no state dict, or of other param groups.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise SpmdZeroUsageError(
            "optimizer.load_state_dict takes what optimizer.state_dict() returned, a dict with "
            f"state and param_groups, and got {_shown(saved)}. Files of DeepSpeed's ranks are "
            "loaded by engine.load_checkpoint"
        )
    groups = list(saved["param_groups"])
    sizes, own = [len(group["params"]) for group in groups], [len(group) for group in names]
    if sizes != own:
        raise SpmdZeroUsageError(
            f"optimizer.load_state_dict: the saved param groups have {sizes} parameters, the "
            f"optimizer's {own}. Make the groups as the saved optimizer had them"
        )
    numbers = [number for group in groups for number in group["params"]]
    ordered = [name for own in names for name in own]
    states = saved["state"]
    pairs = zip(numbers, ordered, strict=True)
    return {name: states[number] for number, name in pairs if number in states}, groups


def _require_fits(
    name: str, state: _Saved, slots: Mapping[str, tuple[int, ...]], *, beside: Sequence[str]
) -> None:
    """Returns if a parameter's saved state has the slots, in the shapes, that the optimizer keeps.

    Args:
        name: the parameter's.
        state: its saved state.
        slots: slot -> shape.
        beside: what the state may have besides, or may lack.

    Raises:
        SpmdZeroUsageError: another optimizer's.
    """
    there, here = (sorted(slots - set(beside)) for slots in (state.keys(), slots.keys()))
    if there != here:
        has, keeps = (listed(slots, most=8) or "nothing" for slots in (there, here))
        raise SpmdZeroUsageError(
            f"optimizer.load_state_dict: of {name} it has {has}, the optimizer keeps {keeps}. Load "
            "the states of an optimizer of the same kind"
        )
    for slot, wanted in slots.items():
        found = tuple(torch.as_tensor(state[slot]).shape) if slot in state else wanted
        if found != wanted:
            raise SpmdZeroUsageError(
                f"optimizer.load_state_dict: {slot} of {name} has shape {list(found)}, the "
                f"optimizer's {list(wanted)}"
            )


def _shown(saved: object) -> str:
    keys = f" of {listed(list(map(str, saved)), most=4)}" if isinstance(saved, Mapping) else ""
    return f"a {type(saved).__name__}{keys}"
