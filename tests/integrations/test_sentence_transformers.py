"""Texts that sentence-transformers embeds past a loader have few lengths, and the same embeddings.

sentence-transformers isn't installed here: a package of its name cuts and calls as it does. The
real one runs in `make test-stack-sentence_transformers`.
"""

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import CardData
from torch import nn

from spmdzero.backend.pure._module_watch import ModuleWatch
from spmdzero.integrations import _lengths, _sentence_transformers
from spmdzero.integrations._initialize import initialize_for_client
from tests.support.bounds import summed
from tests.support.engines import config

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

ROWS, WORDS = 16, 11
CACHING = """
def _create_minibatch(features, begin, end):
    end_of_texts = int(features["attention_mask"][begin:end].any(0).nonzero().max()) + 1
    return {key: value[begin:end, :end_of_texts] for key, value in features.items()}
"""
MODELS = """
from torch import nn

class BaseModel(nn.Sequential):
    def forward(self, input):
        for module in self:
            input = module(input)
        return input
"""
COLLATORS = """
class BaseDataCollator:
    def __init__(self, preprocess_fn):
        self.preprocess_fn = preprocess_fn
"""


class Mean(nn.Module):
    """The mean of the words' vectors, and the length of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = features["attention_mask"][..., None]
        vectors = self.words(features["input_ids"]) * mask
        length = torch.full_like(mask[:, 0, 0], mask.shape[1])
        return {"sentence_embedding": vectors.sum(1) / mask.sum(1), "length": length}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the package, which is imported anew."""
    name = "sentence_transformers"
    base = tmp_path / name / "base"
    (base / "losses").mkdir(parents=True)
    for folder in (base.parent, base, base / "losses"):
        (folder / "__init__.py").write_text("")
    (base / "losses" / "gradcache.py").write_text(CACHING)
    (base / "model.py").write_text(MODELS)
    (base / "data_collator.py").write_text(COLLATORS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_lengths, "choice", lambda: "auto")
    finders = [*sys.meta_path]
    _sentence_transformers.follow_imports()
    yield f"{name}.base"
    sys.meta_path[:] = finders
    for known in [known for known in sys.modules if known.partition(".")[0] == name]:
        del sys.modules[known]


def texts(length: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Rows of up to `length` words, one of them that long."""
    torch.manual_seed(length)
    ends = torch.randint(1, length + 1, (rows, 1))
    ends[-1] = length
    mask = (torch.arange(length) < ends).long()
    return {"input_ids": torch.randint(1, WORDS, (rows, length)) * mask, "attention_mask": mask}


def test_embeddings_of_texts_of_many_lengths_are_those_of_plain_torch(package: str) -> None:
    model: Any = importlib.import_module(f"{package}.model").BaseModel(Mean())
    plain = copy.deepcopy(model)
    engine = initialize_for_client(model=model, config=config(train_micro_batch_size_per_gpu=ROWS))[
        0
    ]
    lengths = set()
    with torch.no_grad():
        for length in (30, 23, 17, 9):
            output, wanted = engine.module(texts(length)), plain(texts(length))
            lengths.add(int(output["length"][0]))
            assert output["sentence_embedding"].numpy() == summed(
                wanted["sentence_embedding"].numpy()
            )
    # The first length is compiled as it is.
    assert lengths == {30, 64}


def test_parts_of_a_batch_have_its_columns(package: str) -> None:
    caching: Any = importlib.import_module(f"{package}.losses.gradcache")
    batch = texts(20)
    batch["attention_mask"][:4, 6:] = 0
    part = caching._create_minibatch(batch, 0, 4)
    assert part.keys() == batch.keys()
    assert all(value.shape == (4, 20) for value in part.values())
    assert torch.equal(part["input_ids"], batch["input_ids"][:4])


def test_a_collator_has_the_tokenizer_of_its_model(package: str) -> None:
    class Model:
        tokenizer = "its own"

        def preprocess(self) -> None: ...

    collators: Any = importlib.import_module(f"{package}.data_collator")
    assert collators.BaseDataCollator(Model().preprocess).tokenizer == "its own"
    assert collators.BaseDataCollator(print).tokenizer is None


def test_what_is_written_on_a_models_card_is_no_other_model() -> None:
    class Card(CardData):
        def __init__(self) -> None:
            self.lines: list[str] = []

    class Note:
        def __init__(self) -> None:
            self.lines: list[str] = []

    model = nn.Linear(2, 2)
    model.card = Card()  # pyrefly: ignore[bad-assignment]
    model.note = Note()  # pyrefly: ignore[bad-assignment]
    watch = ModuleWatch(model, {})
    model.card.lines.append("loss 1.0")  # pyrefly: ignore[missing-attribute]
    assert watch.change() is None
    model.note.lines.append("loss 1.0")  # pyrefly: ignore[missing-attribute]
    assert "has 1 entries" in (watch.change() or "")
