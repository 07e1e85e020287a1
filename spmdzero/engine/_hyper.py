"""The numbers of the param groups, on their way to the devices."""

from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.engine._hold import ROWS, ScheduleHold
from spmdzero.optim import UpdateRule
from spmdzero.xla.mesh import DeviceMesh


def upload_numbers(
    rules: Sequence[UpdateRule],
    groups: list[dict[str, Any]],
    *,
    mesh: DeviceMesh,
    hold: ScheduleHold | None,
    skipped: torch.Tensor,
) -> list[dict[str, torch.Tensor]]:
    """What each rule's `hyper` says of its group, as 0-dim fp32 tensors on the devices.

    One upload for all numbers of all groups: as Python floats they would be a transfer each, and
    0.0 and 1.0 would be constants, which recompiles when a schedule hits them.

    Args:
        rules: one per param group.
        groups: the param groups.
        mesh: the devices.
        hold: what holds the schedule back for skipped steps, None if nothing has to.
        skipped: 0-dim int32 on the device, steps skipped so far.
    """
    hypers = [rule.hyper(group) for rule, group in zip(rules, groups, strict=True)]
    numbers = [value for hyper in hypers for value in hyper.values()]
    # Taken down even where a rule reads its group itself, which then is ahead by what is unread.
    table = hold.table(numbers, groups) if hold is not None else None
    if not numbers:
        return [{} for _ in hypers]
    if hold is None or table is None:
        row = mesh.place(torch.tensor(numbers, dtype=torch.float32))
    else:
        held = mesh.place(torch.tensor(hold.held, dtype=torch.int32))
        behind = (skipped - held).clamp(0, ROWS - 1)
        row = mesh.place(table).index_select(0, behind.reshape(1).long())[0]
    on_device = iter(row.unbind())
    return [{key: next(on_device) for key in hyper} for hyper in hypers]
