"""What TRL's trainers hand to an engine: packed texts as rows, and a model that is to generate."""

from typing import Any

import pytest
import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations import _trl
from spmdzero.integrations._initialize import initialize_for_client
from tests.support.engines import config

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

_PAD = 9
_ONES = [  # Each a row of one text, and of two.
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    {"input_ids": [4, 5], "labels": [4, 5]},
]
_PACKED = [
    {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]},
    {"input_ids": [6, 7], "seq_lengths": [2]},
    {"input_ids": [8, 1, 2, 3], "seq_lengths": [1, 3]},
]


def _collators(**changes: Any) -> tuple[Any, _trl.RowsOfTexts]:
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    own = sft.DataCollatorForLanguageModeling(pad_token_id=_PAD, padding_free=True, **changes)
    return own, _trl.RowsOfTexts(own)


@pytest.mark.parametrize("examples", [_ONES, _PACKED])
def test_rows_of_texts_have_the_tokens_labels_and_positions_of_the_one_row(
    examples: list[dict[str, Any]],
) -> None:
    own, rows = _collators()
    one, batch = own(examples), rows(examples)
    seen = batch["attention_mask"].bool()
    assert len(seen) == len(examples)
    for key in ("input_ids", "labels", "position_ids"):
        if key in batch:
            torch.testing.assert_close(batch[key][seen], one[key][0], msg=key)
    assert ("position_ids" in batch) == (examples is _PACKED)
    assert set(batch["labels"][~seen].tolist()) == {-100}
    assert set(batch["input_ids"][~seen].tolist()) == {_PAD}


def test_rows_of_texts_are_padded_to_the_collators_multiple() -> None:
    _, rows = _collators(pad_to_multiple_of=8)
    assert {tuple(value.shape) for value in rows(_PACKED).values()} == {(3, 8)}
    # A loader's padding asks for these.
    assert (rows.pad_token_id, rows.pad_to_multiple_of) == (_PAD, 8)


def test_trl_finds_no_hooks_of_stage_3_to_remove_before_it_generates() -> None:
    models = pytest.importorskip("trl.models.utils")
    _trl.follow_imports()
    settings = config(
        train_micro_batch_size_per_gpu=8,
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0},
    )
    engine, *_ = initialize_for_client(model=torch.nn.Linear(64, 64), config=settings)
    losses = list[float]()
    for _ in range(2):
        models.remove_hooks(engine)
        models.add_hooks(engine)
        loss = engine(torch.ones(8, 64)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_a_loss_in_the_place_of_the_models_forward_is_refused_by_name() -> None:
    models = pytest.importorskip("trl.models.utils")
    _trl.follow_imports()
    model = torch.nn.Linear(4, 4)
    settings = config(train_micro_batch_size_per_gpu=8)
    engine, *_ = initialize_for_client(model=model, config=settings)

    def loss_of(x: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return model(x).sum() / items

    redirect, given = models._ForwardRedirection(), (torch.ones(8, 4), torch.tensor(32))
    with pytest.raises(SpmdZeroUsageError, match=r"loss_of.*in the place of the model's forward"):
        redirect(engine, model, loss_of, *given)
    plain = torch.nn.Linear(4, 4)
    assert redirect(plain, plain, lambda x: x.sum(), given[0]).item() == 32
