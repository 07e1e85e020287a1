"""Batches of texts are padded to few lengths, by what their masks say."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from spmdzero.data import PadToLengths
from spmdzero.data._lengths import Lengths, padding_of
from spmdzero.errors import SpmdZeroUsageError

pytestmark = pytest.mark.backends("any")

PAD = 3


def batch(*lengths: int, left: bool = False, **more: Any) -> BatchEncoding:
    """Rows as a collator leaves them, each as long as it is asked for."""
    longest = max(lengths)
    places = torch.arange(longest).expand(len(lengths), -1)
    own = torch.tensor(lengths)[:, None]
    mask = (places >= longest - own if left else places < own).long()
    ids = torch.where(mask == 1, places + 10, PAD)
    found = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return BatchEncoding(found | more)


def padded(*batches: Any, **how: Any) -> list[Any]:
    return list(PadToLengths(batches, **how))


def lengths_of(found: list[Any]) -> list[int]:
    return [one["input_ids"].shape[1] for one in found]


def test_each_tensor_has_a_fill_of_its_own() -> None:
    second = batch(
        70, 66, token_type_ids=torch.ones(2, 70, dtype=torch.int64), answer=torch.ones(2)
    )
    first, other = padded(batch(80, 3), second)
    assert first["input_ids"].shape == (2, 80)
    assert isinstance(other, BatchEncoding)
    for key, fill in {
        "input_ids": PAD,
        "attention_mask": 0,
        "labels": -100,
        "token_type_ids": 0,
    }.items():
        assert other[key].shape == (2, 128), key
        assert torch.equal(other[key][:, :70], second[key]), key
        assert other[key][:, 70:].unique().tolist() == [fill], key
    assert torch.equal(other["answer"], second["answer"])
    # What the loader has yielded is its own.
    assert second["input_ids"].shape == (2, 70)


def test_2000_steps_of_texts_of_all_lengths_have_at_most_8_lengths() -> None:
    draw = random.Random(0)
    # Lengths of instructions and answers, cut at what TRL cuts at: as in public data, long-tailed.
    rows = [
        [min(1024, 8 + int(draw.lognormvariate(5.2, 0.9))) for _ in range(8)] for _ in range(2000)
    ]
    found = lengths_of(padded(*(batch(*row) for row in rows)))
    plain = {max(row) for row in rows}
    assert len(plain) > 500
    assert len(set(found)) <= 8
    assert all(own >= max(row) for own, row in zip(found, rows, strict=True))
    # Half of what is computed is of texts, at the least.
    assert sum(found) < 1.25 * sum(max(row) for row in rows)


def test_rows_of_one_length_stay_as_they_are() -> None:
    assert lengths_of(padded(*(batch(50, 40) for _ in range(3)))) == [50] * 3
    assert lengths_of(padded(batch(50), batch(50), batch(51), batch(50), batch(65))) == [
        50,
        50,
        64,
        50,
        128,
    ]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 64), (65, 128), (129, 192), (193, 256), (257, 384), (1100, 1536), (1537, 2048)],
)
def test_automatic_lengths_are_powers_of_two_and_halves_between(length: int, expected: int) -> None:
    assert Lengths().of(length) == expected


def test_lengths_heed_the_collators_multiple_and_the_models_limit() -> None:
    assert {n % 48 for n in map(Lengths(multiple=48).of, range(1, 2000))} == {0}
    assert [Lengths(most=512).of(n) for n in (300, 400, 500, 512)] == [384, 512, 512, 512]
    # RoBERTa's last position that can be used.
    assert Lengths(most=514).of(513) == 514


def test_a_list_of_lengths_is_taken_as_it_is() -> None:
    found = padded(batch(20), batch(90), batch(300), lengths=[256, 32])
    assert lengths_of(found) == [32, 256, 300]
    with pytest.raises(SpmdZeroUsageError, match=r"lengths=\[0\]"):
        PadToLengths([], lengths=[0])


def test_pairs_of_texts_are_padded_each_by_its_own_mask() -> None:
    def pair(chosen: int, rejected: int) -> dict[str, Any]:
        return {f"chosen_{k}": v for k, v in batch(chosen).items()} | {
            f"{k}_rejected": v for k, v in batch(rejected).items()
        }

    _, found, same = padded(pair(5, 6), pair(70, 130), pair(90, 90))
    assert found["chosen_labels"].shape[1] == found["chosen_input_ids"].shape[1] == 128
    assert found["labels_rejected"].shape[1] == found["attention_mask_rejected"].shape[1] == 192
    assert {value.shape[1] for value in same.values()} == {128}


def test_what_a_decoder_writes_has_a_length_of_its_own() -> None:
    def pair(read: int, written: int) -> Any:
        target = batch(written, 1)["labels"]
        return batch(read, labels=target, decoder_input_ids=target.clamp(min=0))

    _, found, longer = padded(pair(9, 20), pair(70, 20), pair(9, 90))
    assert (found["input_ids"].shape, found["labels"].shape) == ((1, 128), (2, 20))
    assert longer["input_ids"].shape == (1, 9)
    assert longer["labels"].shape == longer["decoder_input_ids"].shape == (2, 128)
    assert longer["labels"][:, 90:].unique().tolist() == [-100]
    # Labels of a number for each row are no text, whatever lengths are asked for.
    classes = [batch(n, labels=torch.ones(1, 3, dtype=torch.int64)) for n in (9, 20, 90)]
    assert {one["labels"].shape for one in padded(*classes, lengths=[128])} == {(1, 3)}


def test_left_is_where_the_mask_says_so_and_positions_are_given() -> None:
    rows = batch(70, 30, left=True, position_ids=torch.arange(70).expand(2, -1))
    _, found = padded(batch(9), rows)
    assert found["attention_mask"][:, :58].sum() == 0
    assert torch.equal(found["input_ids"][:, 58:], rows["input_ids"])


class Collator:
    """As transformers' are, with their tokenizer."""

    def __init__(self, **named: Any) -> None:
        self.tokenizer = type("Tokenizer", (), {"pad_token_id": 7, **named})()
        self.pad_to_multiple_of = 8


def test_a_collators_tokenizer_says_what_its_masks_do_not() -> None:
    def second(**named: Any) -> Any:
        wrapper = type("Wrapper", (), {"data_collator": Collator(**named)})()
        padding: Any = padding_of("auto", wrapper)
        padding(batch(9))
        return padding(batch(10))

    assert second()["input_ids"][0, 10:].unique().tolist() == [7]
    assert second(model_max_length=32)["input_ids"].shape == (1, 32)
    assert second(model_max_length=int(1e30))["input_ids"].shape == (1, 64)
    assert second(padding_side="left")["input_ids"].shape == (1, 10)
    assert padding_of("off", Collator()) is None


def half_masked(rows: BatchEncoding) -> Any:
    rows["attention_mask"][:, 0] = rows["attention_mask"][:, -1] = 0
    return rows


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: batch(70, boxes=torch.ones(1, 70, 4)), "'boxes'"),
        (lambda: batch(70, weights=torch.ones(1, 70)), "'weights'"),
        (lambda: batch(70, 30, left=True), "on the left"),
        (lambda: half_masked(batch(70, 30)), "on the left"),
        (lambda: {"input_ids": batch(70)["input_ids"]}, ""),
        (lambda: {"input_ids": torch.ones(1, 70), "attention_mask": torch.ones(1, 70)}, ""),
        (lambda: dict(batch(70)) | {"attention_mask": torch.ones(1, 1, 70, 70)}, ""),
        (lambda: (batch(70)["input_ids"],), ""),
        (lambda: torch.ones(3), ""),
    ],
    ids=["boxes", "weights", "left", "both", "no mask", "floats", "4-d mask", "tuple", "tensor"],
)  # fmt: skip
def test_what_can_not_be_told_from_data_stays_as_it_is(
    make: Callable[[], Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make()
    _, found = padded(batch(9), rows)
    assert found is rows
    assert says in caplog.text
    assert bool(caplog.records) == bool(says)


def test_a_padded_loader_is_the_loader_otherwise() -> None:
    dataset = [batch(n) for n in (9, 10)]
    loader = PadToLengths(torch.utils.data.DataLoader(dataset, batch_size=None))  # type: ignore[arg-type]
    assert len(loader) == 2
    assert loader.dataset is dataset
    assert lengths_of(list(loader)) == lengths_of(list(loader)) == [9, 64]
