"""Small uploads wait for the program that reads them."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

import spmdzero
from spmdzero.backend import Mesh, arrays, runtime
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._uploads import MOST_BYTES, Upload, put
from tests.engine.captured import batches, make_engine

BATCH = ("fsdp", None)


def waits(tensor: torch.Tensor) -> bool:
    value = value_of(tensor)
    return isinstance(value, Upload) and value.waits


@pytest.mark.parametrize(
    "host",
    [
        torch.arange(16).reshape(8, 2) << 40,
        torch.linspace(0, 1, 16).reshape(8, 2).bfloat16(),
        torch.tensor([[True, False]] * 8),
    ],
    ids=["int64", "bf16", "bool"],
)
def test_what_waits_is_what_was_placed(mesh: Mesh, host: torch.Tensor) -> None:
    kept = host.clone()
    placed = mesh.place(host, BATCH, waits=True)
    host.zero_()
    assert waits(placed)
    at_once = mesh.place(kept, BATCH)
    assert arrays.forms_of([placed]) == arrays.forms_of([at_once])
    assert arrays.sharding_of(mesh.mark(placed, BATCH)) == arrays.sharding_of(at_once)
    runtime.wait()
    assert waits(placed)
    assert torch.equal(placed.cpu(), kept)
    assert not waits(placed)
    assert arrays.local_shapes(placed) == [(1, 2)] * 8


def test_operations_send_all_that_waits_at_once(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (mesh.place(torch.full((8, 2), float(n)), BATCH, waits=True) for n in (1, 2))
    sent: list[int] = []
    real = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda x, *more: (sent.append(len(x)), real(x, *more))[1]
    )
    summed = one + two
    assert torch.equal(summed.cpu(), torch.full((8, 2), 3.0))
    # What earlier tests left pending may be sent with them.
    assert len(sent) == 1
    assert not waits(one)
    put([value_of(one), value_of(two)])
    assert len(sent) == 1


def test_what_is_large_goes_at_once(mesh: Mesh) -> None:
    rows = torch.zeros(8, MOST_BYTES // 32 + 1)
    assert not waits(mesh.place(rows, BATCH, waits=True))
    assert waits(mesh.place(rows[:, 1:], BATCH, waits=True))


def three_calls(engine: spmdzero.Engine, x: torch.Tensor) -> Any:
    loss = engine(x)
    engine.backward(loss)
    engine.step()


def train_batch(engine: spmdzero.Engine, x: torch.Tensor) -> Any:
    engine.train_batch(iter([(x,)]))


@pytest.mark.parametrize("step", [train_batch, three_calls])
def test_a_known_step_prepares_no_transfer(
    step: Callable[[spmdzero.Engine, torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(gradient_clipping=0.25)
    # After the eighth the host reads whether replicas agree.
    given = [x for (x,) in batches(7)]
    for x in given[:6]:
        step(engine, x)
    sent: list[Any] = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: (sent.append(args), real(*args))[1])
    for x in given[6:]:
        step(engine, x)
    assert not sent
