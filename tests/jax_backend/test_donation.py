"""Which memory the results of a program take over, read in the compiled program."""

import re
import warnings

import torch

from spmdzero.backend import REPLICATED, Mesh, arrays, counters, programs, runtime

SHAPE = (24, 40)


def placed(mesh: Mesh, *numbers: float) -> list[torch.Tensor]:
    tensors = [
        mesh.mark(mesh.place(torch.full(SHAPE, number)) * 1, REPLICATED) for number in numbers
    ]
    runtime.sync()
    return tensors


def update(mesh: Mesh, first: torch.Tensor, second: torch.Tensor) -> None:
    """Of both by what both are, the second first, as an optimizer that follows the gradients."""
    both = (first * second).sum()
    for weight in (second, first):
        arrays.set_value(weight, mesh.mark(weight - both * weight, REPLICATED))


def test_a_new_weight_is_written_over_its_old_one_in_whatever_order_they_are_made(
    mesh: Mesh,
) -> None:
    weights = placed(mesh, 2.0, 3.0)
    update(mesh, *weights)
    text = programs.optimized_hlo([weights[1], weights[0]])
    shape = ",".join(map(str, SHAPE))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
    assert text.partition("\n")[0].count("-alias)") == 2
    assert programs.returned([weights[1], weights[0]]) == [1, 0]
    runtime.sync()
    assert counters.aliased_inputs() == 2
    both = 2.0 * 3.0 * SHAPE[0] * SHAPE[1]
    for weight, before in zip(weights, (2.0, 3.0), strict=True):
        assert weight.cpu().unique().tolist() == [before - both * before]


def test_a_weight_that_is_written_twice_takes_over_what_it_was_before_both(mesh: Mesh) -> None:
    first, second = placed(mesh, 2.0, 3.0)
    update(mesh, first, second)
    update(mesh, first, second)
    assert programs.returned([second, first]) == [1, 0]


def test_memory_that_somebody_holds_is_not_given_away(mesh: Mesh) -> None:
    first, second = placed(mesh, 2.0, 3.0)
    held = first.detach()
    kept = torch.empty_like(first)
    kept.data = first.data
    arrays.set_value(second, mesh.mark(second * first, REPLICATED))
    runtime.sync()
    assert counters.aliased_inputs() == 1
    assert held.cpu().unique().tolist() == kept.cpu().unique().tolist() == [2.0]
    assert second.cpu().unique().tolist() == [6.0]


def test_a_value_of_the_replicas_takes_no_batchs_memory(mesh: Mesh) -> None:
    spec = ("fsdp", None)
    batch = mesh.mark(mesh.place(torch.ones(16, 4), spec) * 1, spec)
    whole = mesh.mark(mesh.place(torch.ones(16, 4)) * 1, REPLICATED)
    runtime.sync()
    total = mesh.mark(batch.sum(), REPLICATED)
    # Of the batch's shape on each of the devices: an array of eight times its size.
    inner = mesh.enter(whole, (None, None)) * 3
    del batch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.sync()
    assert total.item() == 64
    assert mesh.leave(inner, spec, (128, 4)).cpu().unique().tolist() == [3.0]
