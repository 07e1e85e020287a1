"""What a step that is recorded again, or started again, is spared."""

import gc

import pytest
import torch

import spmdzero
from spmdzero.backend import Mesh, arrays, compiler
from spmdzero.backend.jax.lazy import _meta
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._values import Value
from spmdzero.backend.jax.region import JaxGathering
from tests.support.contract import make_batch, make_model
from tests.support.engines import start

DEVICE = torch.device("xla", 0)


def test_forms_are_remembered_by_all_that_decides_them(mesh: Mesh) -> None:
    x = torch.arange(12).reshape(3, 4).to(DEVICE)
    add, div = torch.ops.aten.add.Tensor, torch.ops.aten.div.Tensor
    first = _meta.on_meta(add, (x, 1), {})
    assert _meta.on_meta(add, (x, 1), {}) is first
    assert first.dtype == torch.int64
    # Equal in Python, and another number to torch.
    assert _meta.on_meta(add, (x, 1.0), {}).dtype == torch.float32
    assert _meta.on_meta(add, (x > 0, True), {}).dtype == torch.bool
    assert _meta.on_meta(add, (x > 0, 1), {}).dtype == torch.int64
    assert _meta.on_meta(add, (x.t(), 1), {}).stride() == x.t().stride()
    assert _meta.on_meta(div, (x, x), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert _meta.on_meta(div, (x, x), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_error_is_raised_each_time(mesh: Mesh) -> None:
    x = torch.ones(3, 4).to(DEVICE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            torch.add(x, torch.ones(5).to(DEVICE))


def test_what_a_folded_function_marked_is_not_marked_again(mesh: Mesh) -> None:
    spec = ("fsdp", None)
    x = mesh.place(torch.ones(16, 4))
    folded = compiler.fold(lambda given: [mesh.mark(given[0] + 1, spec)], [x])
    (made,) = folded([x])
    node = value_of(made).node
    assert node is not None
    mesh.mark(made, spec)
    assert value_of(made).node is node
    assert arrays.sharding_of(made) == "{devices=[8,1]<=[8]}"
    # Another sharding is an operation of its own.
    other = mesh.mark(arrays.fresh(made), (None, None))
    assert arrays.sharding_of(other) == "{replicated}"
    assert arrays.local_shapes(made) == [(2, 4)] * 8
    assert arrays.local_shapes(other) == [(16, 4)] * 8
    assert torch.equal(arrays.read(made), torch.full((16, 4), 2.0))


def trained(steps: int) -> spmdzero.Engine:
    engine = start(make_model())
    train(engine, steps)
    return engine


def train(engine: spmdzero.Engine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(*make_batch(step, 0)))
        engine.step()


def values() -> int:
    return sum(type(found) is Value for found in gc.get_objects())


def test_a_step_leaves_no_value_to_pythons_collector() -> None:
    # It would keep the batch on the devices until Python looks for cycles.
    engine = trained(5)
    gc.collect()
    before = values()
    gc.disable()
    try:
        train(engine, 3)
        assert values() == before
    finally:
        gc.enable()


def test_what_is_computed_on_demand_never_sees_a_later_weight(mesh: Mesh) -> None:
    engine = trained(6)
    weight = next(engine.module.parameters()).detach()
    twice = weight * 2
    JaxGathering(engine.mesh).stand_in(twice)
    train(engine, 1)
    assert engine.capture.ends.repeated
    # The program has overwritten what it would be computed from.
    with pytest.raises(RuntimeError, match="deleted"):
        twice.cpu()


def test_the_three_calls_record_no_operation_for_each_parameter() -> None:
    engine = trained(4)
    optimizer = engine.optimizer
    engine.backward(engine(*make_batch(4, 0)))
    optimizer.folds.wanted = engine.capture.before_update()
    optimizer.step()
    tensors = [t for name, t in optimizer.tensors().items() if not name.startswith("counter/")]
    assert all(arrays.are_pending(tensors))
    # Those that are updated together are results of one.
    assert len({id(value_of(tensor).node) for tensor in tensors}) < len(tensors) / 50
