"""`train_batch(batch)`: the rows of a whole step in one call."""

import pytest
import torch

import spmdzero
from tests.engine.captured import LENGTH, ROWS, WIDTH, assert_same_state, make_engine

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))


def test_a_batch_is_cut_into_the_micro_batches_of_its_step() -> None:
    x = rows(2 * ROWS)
    by_iterator, by_batch = (make_engine(gradient_accumulation_steps=2) for _ in range(2))
    by_batch.module.load_state_dict(
        {k: v.cpu() for k, v in by_iterator.module.state_dict().items()}
    )
    losses = []
    for engine, data in ((by_iterator, iter(x.split(ROWS))), (by_batch, {"x": x})):
        torch.manual_seed(1)
        losses.append(engine.train_batch(data).item())
    assert losses[0] == losses[1]
    assert by_batch.micro_steps == 2
    assert_same_state(by_iterator, by_batch)


def test_a_batch_of_other_rows_is_refused_with_how_many_a_step_has() -> None:
    engine = make_engine(gradient_accumulation_steps=2)
    for batch in (rows(ROWS), (), (torch.tensor(1.0),)):
        with pytest.raises(
            spmdzero.SpmdZeroUsageError, match=r"32 = gradient_accumulation_steps \(2\)"
        ):
            engine.train_batch(batch)
        assert engine.micro_steps == 0
