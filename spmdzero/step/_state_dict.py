"""An optimizer's states in torch's form: whole tensors on the host, by parameter number."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from spmdzero._names import listed
from spmdzero.backend import arrays, runtime, undistributed
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule, decoded, is_signed, recoded, zero_code
from spmdzero.plan import coded_slot, scale_slot
from spmdzero.precision import LossScaler
from spmdzero.step._client_states import STEP
from spmdzero.step._numbers import take_over_numbers
from spmdzero.step._state import State

_SCALER = "loss_scaler"
"""Key of fp16's scale."""

_Saved = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeStates:
    """An optimizer's state dict, with whole tensors on the host.

    It is read and written as in a checkpoint: torch's own code would round masters and moments to
    the parameter's dtype, give each device whole tensors, and forget the count of updates.

    Attributes:
        held: the training state.
        groups, rules: the param groups, and the update rule of each.
        reset_at: name of a parameter -> the count of updates when its state started anew.
        scaler: fp16's loss scale.
    """

    held: State
    groups: list[dict[str, Any]]
    rules: Sequence[UpdateRule]
    reset_at: dict[str, int]
    scaler: LossScaler | None

    @torch.no_grad()
    def taken(self) -> dict[str, Any]:
        """The present state dict, see `ZeroOptimizer.state_dict`."""
        held, names = self.held, self.held.names
        members = [p for group in self.groups for p in group["params"]]
        number_of = {parameter: number for number, parameter in enumerate(members)}
        count = held["counter/applied"].detach().cpu()
        groups = [
            group | {"params": [number_of[parameter] for parameter in group["params"]]}
            for group in self.groups
        ]
        states = {
            number_of[parameter]: {STEP: count - self.reset_at.get(names[parameter], 0)}
            | {slot: self._whole(parameter, slot) for slot in self._slots(parameter)}
            for parameter in held.trained(self.groups)
        }
        packed = {"state": states, "param_groups": groups}
        scaler = self.scaler
        return packed | ({_SCALER: dataclasses.asdict(scaler)} if scaler is not None else {})

    @torch.no_grad()
    def take_over(self, saved: Mapping[str, Any]) -> None:
        """Loads a state dict, see `ZeroOptimizer.load_state_dict`.

        Raises:
            SpmdZeroUsageError: the state dict has different param groups or a different optimizer.
        """
        held, names = self.held, self.held.names
        ordered = [[names[p] for p in group["params"]] for group in self.groups]
        states, groups = _states_by_name(saved, ordered)
        members = {names[parameter]: parameter for parameter in held.trained(self.groups)}
        states = {name: state for name, state in states.items() if name in members}
        counts = {name: int(state[STEP]) for name, state in states.items() if STEP in state}
        applied = held["counter/applied"]
        if counts:
            count = max(counts.values())
        else:
            # torch's SGD doesn't count, and the first update differs from later ones.
            count = max(1, int(applied.item())) if any(states.values()) else 0
        for name, state in states.items():
            parameter = members[name]
            shapes = {slot: self._own_shape(parameter, slot) for slot in self._slots(parameter)}
            _require_fits(name, state, shapes, beside=("master", STEP))
        # The places of a tensor's parts are known only after it is computed.
        runtime.sync()
        runtime.wait()
        for rule, group in zip(self.rules, self.groups, strict=True):
            for parameter in group["params"]:
                new = states.get(names[parameter])
                for slot, stored in held.slots.get(parameter, {}).items():
                    if new is None and slot != "master":
                        self._fill(stored, torch.full(stored.shape, rule.initial(slot, group)))
                for slot, value in ({} if new is None else new).items():
                    if slot in held.slots.get(parameter, {}):
                        self._take(parameter, slot, torch.as_tensor(value))
        self._fill(applied, count)
        self.reset_at.clear()
        if counts:
            self.reset_at.update(
                {n: count - counts.get(n, 0) for n in members if counts.get(n, 0) < count}
            )
        for group, numbers in zip(self.groups, groups, strict=True):
            take_over_numbers(group, numbers)
        if self.scaler is not None and _SCALER in saved:
            self.scaler.load(saved[_SCALER])
        runtime.sync()
        runtime.wait()

    def _own_shape(self, parameter: torch.Tensor, slot: str) -> tuple[int, ...]:
        return self.held.plan.at_rest(f"{slot}/{self.held.names[parameter]}").shape

    def _slots(self, parameter: torch.Tensor) -> list[str]:
        """The states that a state dict has: values in the place of codes and their scales."""
        coded = self._coded(parameter)
        return [slot for slot in self.held.slots[parameter] if coded_slot(slot) not in coded]

    def _coded(self, parameter: torch.Tensor) -> tuple[str, ...]:
        return self.held.plan[self.held.names[parameter]].param.eight_bits

    def _whole(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        slots, shape = self.held.slots[parameter], self._own_shape(parameter, slot)
        found = _on_host(slots[slot], shape)
        if slot not in self._coded(parameter):
            return found
        scale = scale_slot(slot)
        scales = _on_host(slots[scale], self._own_shape(parameter, scale))
        return decoded(found, scales, signed=is_signed(slot))

    def _take(self, parameter: torch.Tensor, slot: str, value: torch.Tensor) -> None:
        slots = self.held.slots[parameter]
        if slot in self._coded(parameter):
            scales = slots[scale_slot(slot)]
            whole = undistributed(value).detach().cpu().float()
            value, size = recoded(whole, scales=scales.shape, signed=is_signed(slot))
            self._fill(scales, size)
            self._fill(slots[slot], value, padding=zero_code(slot))
        else:
            self._fill(slots[slot], value)

    def _fill(self, stored: torch.Tensor, value: Any, *, padding: int = 0) -> None:
        whole = undistributed(torch.as_tensor(value))
        self.held.mesh.overwrite(stored, _device_parts(stored, whole, padding=padding))


def _on_host(stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor `[*shape]` on the CPU, read from the devices' parts without padding."""
    whole = arrays.read(stored.detach())
    if tuple(whole.shape) == shape:
        return whole.clone()
    return whole[: math.prod(shape)].reshape(shape).clone()


def _device_parts(stored: torch.Tensor, whole: torch.Tensor, *, padding: int) -> list[torch.Tensor]:
    """The parts of a host's value for each local device, in the form of `stored`."""
    whole = whole.detach().cpu().to(stored.dtype)
    if whole.shape != stored.shape:
        missing = stored.numel() - whole.numel()
        whole = F.pad(whole.reshape(-1), (0, missing), value=padding)
    return [whole[part].contiguous() for part in arrays.local_slices(stored)]


def _states_by_name(
    saved: object, names: Sequence[Sequence[str]]
) -> tuple[dict[str, _Saved], list[_Saved]]:
    """The states by parameter name, and the param groups, of a state dict.

    Args:
        saved: the state dict.
        names: names of the parameters in each of the optimizer's param groups, in the order of the
            saved numbers, as in torch.

    Raises:
        SpmdZeroUsageError: `saved` is no state dict, or has different param groups.
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
    """Returns if a parameter's saved state has the optimizer's slots, with the same shapes.

    Args:
        name: the parameter's name.
        state: the parameter's saved state.
        slots: slot -> shape.
        beside: keys that the state may have or lack.

    Raises:
        SpmdZeroUsageError: the state is that of a different optimizer.
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
