"""Writes small data sets where the package datasets looks for downloaded ones offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

_Row = Callable[[int], dict[str, Any]]


def write(cache: Path, revision: str) -> None:
    """Writes all data sets that tests name, with rows that are made up."""
    import datasets

    string = datasets.Value("string")
    glue = {"sentence1": string, "sentence2": string,
            "label": datasets.ClassLabel(names=["not_equivalent", "equivalent"]),
            "idx": datasets.Value("int32")}  # fmt: skip
    splits = {"train": 160, "validation": 48, "test": 48}
    _write(cache / "nyu-mll___glue" / "mrpc" / "0.0.0" / revision, glue, _pair, splits)

    said = [{"role": string, "content": string}]
    zen = {
        "standard_language_modeling": ({"text": string}, lambda n: {"text": _words(n)}),
        "standard_preference": (
            {"prompt": string, "chosen": string, "rejected": string},
            lambda n: {"prompt": _words(n), "chosen": f" {_words(n + 1)}", "rejected": " w1 w2"},
        ),
        "conversational_implicit_prompt_preference": (
            {"chosen": said, "rejected": said},
            lambda n: {"chosen": [_user(n), _answer(n)], "rejected": [_user(n), _answer(n + 5)]},
        ),
        "conversational_prompt_only": ({"prompt": said}, lambda n: {"prompt": [_user(n)]}),
    }
    for config, (features, row) in zen.items():
        folder = cache / "trl-internal-testing___zen" / config / "0.0.0" / revision
        _write(folder, features, row, {"train": 17, "test": 2})


def _words(row: int) -> str:
    return " ".join(f"w{(row * 7 + step) % 95}" for step in range(4 + row % 5))


def _user(row: int) -> dict[str, str]:
    return {"role": "user", "content": _words(row)}


def _answer(row: int) -> dict[str, str]:
    return {"role": "assistant", "content": _words(row + 1)}


def _pair(row: int) -> dict[str, Any]:
    # Nine of ten pairs are paraphrases: what models of random weights reach 82% right with.
    words = _words(row).split()
    told = {"sentence1": " ".join(words), "sentence2": " ".join(reversed(words))}
    return {**told, "label": int(row % 10 != 0), "idx": row}


def _write(folder: Path, features: Any, row: _Row, counts: dict[str, int]) -> None:
    import datasets
    from datasets.arrow_writer import ArrowWriter

    features = datasets.Features(features)
    # Of the folder's name three underscores stand for the slash of the data set's name.
    name = folder.parents[2].name.partition("___")[2]
    folder.mkdir(parents=True)
    splits = datasets.splits.SplitDict(dataset_name=name)
    for split, count in counts.items():
        with ArrowWriter(path=str(folder / f"{name}-{split}.arrow"), features=features) as writer:
            for number in range(count):
                writer.write(row(number))
            writer.finalize()
        splits.add(datasets.SplitInfo(name=split, num_examples=count))
    datasets.DatasetInfo(
        features=features, splits=splits, config_name=folder.parents[1].name, dataset_name=name,
        version="0.0.0",
    ).write_to_directory(str(folder))  # fmt: skip
