"""Packed sequences and CTC, whose lengths are numbers of the host, as torch wants them.

torch's kernels compute where each row lies from the lengths, in memory that these tensors don't
have. torch's recurrent layers take the packed rows step by step, with operations that are recorded.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from spmdzero._user_line import user_line
from spmdzero.backend.jax.lazy._python import Answer, answer
from spmdzero.backend.jax.lazy._tensor import LazyTensor


@answer(torch._pack_padded_sequence)
def _pack(
    rows: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[sum(lengths), *]`, time step by time step, and the number of rows at each, on the CPU."""
    if isinstance(lengths, LazyTensor):
        raise RuntimeError(
            f"{user_line()}: 'lengths' argument should be a 1D CPU int64 tensor. Use lengths.cpu()"
        )
    if batch_first:
        rows = rows.transpose(0, 1)
    numbers = lengths.tolist()
    if len(numbers) != rows.shape[1]:
        raise RuntimeError(
            f"{user_line()}: Expected `len(lengths)` to be equal to batch_size, but got "
            f"{len(numbers)} (batch_size={rows.shape[1]})"
        )
    if numbers != sorted(numbers, reverse=True) or numbers[-1] <= 0:
        raise RuntimeError(
            f"{user_line()}: the lengths of packed rows, {numbers}, have to be positive and "
            "descending; pass enforce_sorted=False to have torch sort them"
        )
    if numbers[0] > rows.shape[0]:
        raise RuntimeError(
            f"{user_line()}: a packed row of length {numbers[0]} is longer than the rows, "
            f"{rows.shape[0]}"
        )
    sizes = [sum(number > step for number in numbers) for step in range(numbers[0])]
    parts = [
        rows[start : start + steps, :size].flatten(0, 1) for start, steps, size in _runs(sizes)
    ]
    return torch.cat(parts), torch.tensor(sizes)


@answer(torch._pad_packed_sequence)
def _pad(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, `padding_value` after the end of each, and their lengths on the CPU."""
    sizes = batch_sizes.tolist()
    if 0 < total_length < len(sizes):
        raise RuntimeError(
            f"{user_line()}: Expected total_length to be at least the length of the longest "
            f"sequence in input, but got total_length={total_length} and max sequence length being "
            f"{len(sizes)}"
        )
    parts, place = [], 0
    for _, steps, size in _runs(sizes):
        part = data[place : place + steps * size].unflatten(0, (steps, size))
        missing = part.new_full((steps, sizes[0] - size, *data.shape[1:]), padding_value)
        parts.append(torch.cat([part, missing], 1))
        place += steps * size
    if total_length > len(sizes):
        shape = (total_length - len(sizes), sizes[0], *data.shape[1:])
        parts.append(data.new_full(shape, padding_value))
    rows = torch.cat(parts)
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return (rows.transpose(0, 1) if batch_first else rows), lengths


def _runs(sizes: list[int]) -> list[tuple[int, int, int]]:
    """First step, number of steps and number of rows of each run of equal sizes."""
    found, start = [], 0
    for size, run in itertools.groupby(sizes):
        steps = len(list(run))
        found.append((start, steps, size))
        start += steps
    return found


def _of_lengths(loss: Answer) -> Answer:
    def of_tensors(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # With lists torch's C++ code looks into the memory of the targets.
        input_lengths, target_lengths = (
            given if isinstance(given, torch.Tensor) else torch.tensor(given)
            for given in (input_lengths, target_lengths)
        )
        return loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)

    return of_tensors


for _loss in (torch.ctc_loss, F.ctc_loss):
    answer(_loss)(_of_lengths(_loss))
