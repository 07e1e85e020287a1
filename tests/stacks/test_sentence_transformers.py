"""sentence-transformers' Trainer with a ds_config.json, beside the same script by plain torch.

One process has the rows of all devices, so a contrastive loss has the negatives of all of them.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.stacks import embeddings
from tests.stacks.runs import by_spmdzero, by_torch, logged

SCRIPT = Path(__file__).parent / "embeddings_script.py"
STEPS = 6
USUAL = [
    "--per_device_train_batch_size", "8", "--learning_rate", "1e-3", "--max_steps", str(STEPS),
    "--logging_steps", "1", "--report_to", "none", "--seed", "1", "--disable_tqdm", "true",
]  # fmt: skip


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` and `data`."""
    folder = tmp_path_factory.mktemp("embeddings")
    embeddings.write_model(folder / "model")
    embeddings.write_data(folder / "data")
    return folder


class Script:
    """The script with one loss, run into folders of its own."""

    def __init__(self, loss: str, files: Path, folder: Path) -> None:
        self._loss, self._files, self._folder = loss, files, folder

    def _words(self, out: Path, *more: str) -> list[str]:
        told = [self._loss, self._files / "model", self._files / "data", out]
        return [str(SCRIPT), *map(str, told), *USUAL, *more]

    def ours(self, name: str, stage: int, *more: str, status: int = 0) -> tuple[Path, str]:
        """Runs it by spmdzero; returns its folder, and what it said."""
        config = self._folder / f"ds_{stage}.json"
        auto = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
                "gradient_accumulation_steps")  # fmt: skip
        told = dict.fromkeys(auto, "auto") | {"zero_optimization": {"stage": stage}}
        config.write_text(json.dumps(told))
        words = self._words(self._folder / name, "--deepspeed", str(config), *more)
        said = by_spmdzero(words, cwd=self._folder, status=status).said
        return self._folder / name, said

    def plain(self, *more: str) -> Path:
        """Runs it by plain torch; returns its folder."""
        by_torch(["python", *self._words(self._folder / "plain", *more)], cwd=self._folder)
        return self._folder / "plain"


@pytest.mark.parametrize(
    ("loss", "stage"),
    [
        ("mnrl", 2),
        ("mnrl-triplets", 1),
        ("mnrl-gathered", 3),
        ("cached-mnrl", 2),
        ("cached-mnrl-gathered", 3),
        ("cosent", 2),
        ("triplet", 1),
        ("matryoshka", 2),
    ],
)
def test_a_loss_is_that_of_one_process_with_all_rows(
    loss: str, stage: int, files: Path, tmp_path: Path
) -> None:
    script = Script(loss, files, tmp_path)
    folder, said = script.ours("ours", stage, "--save_strategy", "no")
    plain = script.plain("--save_strategy", "no")
    for key in ("loss", "grad_norm"):
        found, wanted = _last_log(folder, key), _last_log(plain, key)
        assert len(wanted) == STEPS
        print(f"\n{loss}, stage {stage}, {key}:", *(f"{a:.5f} ({b:.5f})"
              for a, b in zip(found, wanted, strict=True)))  # fmt: skip
        # fp32: sums in another order, through six steps of AdamW.
        assert found == pytest.approx(wanted, rel=1e-4), key
    assert f"ZeRO-{stage}" in said
    assert "as the model has changed" not in said
    # The texts of each batch, and of each part of one, have a length of their own.
    assert said.count("compiled the step") < STEPS


def _last_log(folder: Path, key: str) -> list[float]:
    return [entry[key] for entry in json.loads((folder / "log.json").read_text()) if key in entry]


def test_accumulation_has_the_negatives_of_each_micro_batch(files: Path, tmp_path: Path) -> None:
    script, more = Script("cached-mnrl", files, tmp_path), ["--gradient_accumulation_steps", "2"]
    folder, _ = script.ours("ours", 2, "--save_strategy", "no", *more)
    plain = script.plain("--save_strategy", "no", *more)
    assert _last_log(folder, "loss") == pytest.approx(_last_log(plain, "loss"), rel=1e-4)


def test_it_evaluates_saves_and_resumes(files: Path, tmp_path: Path) -> None:
    script = Script("mnrl", files, tmp_path)
    more = ["--eval_strategy", "steps", "--eval_steps", "3", "--save_steps", "3"]
    straight, said = script.ours("straight", 2, *more)
    plain = script.plain(*more)
    for key in (
        "loss", "eval_loss", "eval_sts_pearson_cosine", "eval_sts_spearman_cosine",
        "eval_triplets_cosine_accuracy",
    ):  # fmt: skip
        wanted = _last_log(plain, key)
        assert len(wanted) == (STEPS if key == "loss" else 2)
        assert _last_log(straight, key) == pytest.approx(wanted, rel=1e-4), key
    assert "as the model has changed" not in said

    half = tmp_path / "half"
    shutil.copytree(straight / "checkpoint-3", half / "checkpoint-3")
    again, _ = script.ours("half", 2, *more, "--resume_from_checkpoint", str(half / "checkpoint-3"))
    # Bit for bit.
    assert logged(again) == logged(straight)

    from sentence_transformers import SentenceTransformer

    texts = ["ba do bado", "ki ri", "do me domedo do " * 3]
    found, wanted = (
        SentenceTransformer(str(folder / "final"), device="cpu").encode(texts)
        for folder in (straight, plain)
    )
    # AdamW's steps are of the learning rate's size, whatever the gradient's rounding is.
    assert found == pytest.approx(wanted, abs=1e-3)


def test_a_loss_with_weights_of_its_own_is_refused(files: Path, tmp_path: Path) -> None:
    _, said = Script("softmax", files, tmp_path).ours("ours", 2, status=1)
    assert "that is not a parameter of the model" in said
    assert "a loss that has weights" in said
