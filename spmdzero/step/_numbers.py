"""Collects the host's numbers for a step, which are uploaded to the devices."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule
from spmdzero.precision import LossScaler
from spmdzero.step._schedule_hold import ROWS, ScheduleHold


def numbers_of_groups(
    keys: Sequence[Sequence[str]], placed: Sequence[torch.Tensor], skipped: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """The numbers of each group as 0-dim fp32 tensors on the devices, without a read.

    Args:
        keys: names of each group's numbers.
        placed: the result of `group_numbers`, on the devices.
        skipped: number of steps skipped so far, 0-dim int32.
    """
    if not placed:
        return [{} for _ in keys]
    if len(placed) == 1:
        (row,) = placed
    else:
        held, table = placed
        behind = (skipped - held).clamp(0, ROWS - 1)
        row = table.index_select(0, behind.reshape(1).long())[0]
    on_device = iter(row.unbind())
    return [{key: next(on_device) for key in group} for group in keys]


def group_numbers(
    rules: Sequence[UpdateRule], groups: list[dict[str, Any]], hold: ScheduleHold | None
) -> list[torch.Tensor]:
    """The numbers of all groups, for an upload; called once a step, as `hold` records them.

    All numbers of all groups share one upload: as Python floats they would need one transfer each,
    and 0.0 and 1.0 would be constants, which recompile when a schedule reaches them.

    Args:
        rules: one rule per param group.
        groups: the param groups.
        hold: holds the schedule back for skipped steps, or None.
    """
    numbers = [value for hyper in _hypers(rules, groups) for value in hyper.values()]
    # The groups are recorded even if a rule reads its group itself. Such a rule is ahead by the
    # skipped steps that are not yet read.
    table = hold.table(numbers, groups) if hold is not None else None
    if not numbers:
        return []
    if hold is None or table is None:
        return [torch.tensor(numbers, dtype=torch.float32)]
    return [torch.tensor(hold.held, dtype=torch.int32), table]


def number_keys(
    rules: Sequence[UpdateRule], groups: list[dict[str, Any]]
) -> tuple[tuple[str, ...], ...]:
    """The names of each group's numbers."""
    return tuple(tuple(hyper) for hyper in _hypers(rules, groups))


def take_over_numbers(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Gives a param group the numbers of a saved group, of any parameters."""
    for key, value in saved.items():
        if key == "params":
            continue
        if isinstance(group.get(key), torch.Tensor):
            # The tensor is filled in place, as other code may hold it.
            group[key].fill_(value)
        else:
            group[key] = value


def numbers_at(
    rules: Sequence[UpdateRule], groups: list[dict[str, Any]], then: list[dict[str, Any]]
) -> list[float]:
    """The numbers of `groups` with the lr and momentum of the groups `then`."""
    merged = [group | held for group, held in zip(groups, then, strict=True)]
    return [value for hyper in _hypers(rules, merged) for value in hyper.values()]


def fixed_numbers(rules: Sequence[UpdateRule], groups: list[dict[str, Any]]) -> Hashable:
    """The values of groups whose rules read them in Python, which are constants of a program."""
    return tuple(
        (repr({key: value for key, value in group.items() if key != "params"}), rule.attributes())
        for rule, group in _pairs(rules, groups)
        if not rule.hyper(group)
    )


def _hypers(rules: Sequence[UpdateRule], groups: list[dict[str, Any]]) -> list[Mapping[str, float]]:
    return [rule.hyper(group) for rule, group in _pairs(rules, groups)]


def _pairs(
    rules: Sequence[UpdateRule], groups: list[dict[str, Any]]
) -> Iterator[tuple[UpdateRule, dict[str, Any]]]:
    if len(groups) != len(rules):
        raise SpmdZeroUsageError(
            f"optimizer.param_groups had {len(rules)} entries after initialize and has "
            f"{len(groups)}: the sharding plan has placed the states of each. Pass all groups as "
            'model_parameters; one that is not to train can have "lr": 0'
        )
    return zip(rules, groups, strict=True)


def loss_scale_number(scaler: LossScaler) -> torch.Tensor:
    """The factor of the loss, 0-dim fp32."""
    return torch.tensor(scaler.used, dtype=torch.float32)


def scale_numbers(scaler: LossScaler) -> torch.Tensor:
    """The loss scale now, and after the coming step if that applies: `[2]` fp32."""
    return torch.tensor([scaler.used, scaler.used_if_applied()], dtype=torch.float32)


def step_number(step: int) -> torch.Tensor:
    """1 + the step, 0-dim int32; 0 means no step."""
    return torch.tensor(step + 1, dtype=torch.int32)
