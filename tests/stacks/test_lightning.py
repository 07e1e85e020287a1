"""Runs Lightning's examples with the names of its DeepSpeed strategies, beside Lightning alone."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.stacks import lightning_material, runs
from tests.suites import sources

BASICS = "examples/pytorch/basics"
# Batches of an epoch: the whole takes minutes on a CPU.
SHORT = "--trainer.log_every_n_steps=1 --trainer.max_epochs=2 " + " ".join(
    f"--trainer.limit_{part}_batches={count}"
    for part, count in (("train", 6), ("val", 2), ("test", 2), ("predict", 2))
)
AUTOENCODER = "autoencoder.py"
BACKBONE = "backbone_image_classifier.py --model.learning_rate=1e-2"
IMAGES = "examples/fabric/image_classifier/train_fabric.py --epochs 2 --log-interval 1"
LANGUAGE = "examples/fabric/language_model/train.py"
# Sums in another order, in fp32.
CLOSE = 1e-4


class Examples:
    """The examples, and a folder for each run with what they would download."""

    def __init__(self, folder: Path) -> None:
        source = sources.read_source(Path(__file__).parent / "lightning" / "repository.toml")
        sources.fetch(source)
        self._root, self._folder = source.root, folder

    def folder(self, name: str, digits: tuple[int, int] | None) -> Path:
        folder = self._folder / name
        shutil.copytree(self._root / "examples", folder / "examples")
        lightning_material.write_text(folder / "data")
        if digits is not None:
            train, test = digits
            lightning_material.write_digits(folder / "data", train=train, test=test)
        # The examples look for it beside themselves.
        for place in (folder, folder / "examples"):
            (place / "Datasets").symlink_to(folder / "data")
        return folder

    def plain(self, line: str, digits: tuple[int, int] | None = None) -> tuple[str, Path]:
        """What an example prints by Lightning alone, in one process, and its folder."""
        folder = self.folder("plain", digits)
        return runs.by_torch(line.split(), cwd=folder).said, folder

    def ours(
        self, line: str, digits: tuple[int, int] | None = None, status: int = 0, **variables: str
    ) -> tuple[str, Path]:
        """The same by spmdzero on two devices."""
        folder = self.folder("ours", digits)
        return runs.by_spmdzero(line.split(), cwd=folder, status=status, **variables).said, folder


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    return Examples(tmp_path)


def logged(folder: Path) -> dict[str, list[float]]:
    """The columns of what Lightning's own logger has written, without empty places."""
    (path,) = (folder / "lightning_logs").glob("version_*/metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    names = [name for name in rows[0] if name not in ("epoch", "step")]
    return {name: [float(row[name]) for row in rows if row[name]] for name in names}


def assert_logged(ours: Path, plain: Path, *, steps: int) -> None:
    mine, its = logged(ours), logged(plain)
    assert mine.keys() == its.keys()
    losses = "train_loss_step" if "train_loss_step" in its else "train_loss"
    print("\n", *(f"{a} ({b})," for a, b in zip(mine[losses], its[losses], strict=True)))
    assert len(its[losses]) == steps
    assert its[losses][-1] < its[losses][0]
    for name in its:
        assert mine[name] == pytest.approx(its[name], rel=CLOSE), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_transformer_has_the_losses_of_lightning_alone(stage: int, examples: Examples) -> None:
    line = f"{BASICS}/transformer.py"
    _, wanted = examples.plain(f"python {line}")
    said, found = examples.ours(line, STRATEGY=f"deepspeed_stage_{stage}")
    assert_logged(found, wanted, steps=10)
    assert f"ZeRO-{stage}" in said
    # The mask that its first forward makes and keeps doesn't have each step traced.
    assert "runs the model's Python at every step" not in said


@pytest.mark.parametrize(
    ("script", "stage"),
    [(AUTOENCODER, "2"), (AUTOENCODER, "3"), (AUTOENCODER, "3_offload"), (BACKBONE, "2")],
)
def test_a_command_of_lightnings_cli_has_the_numbers_of_lightning_alone(
    script: str, stage: str, examples: Examples
) -> None:
    line, digits = f"{BASICS}/{script} {SHORT}", (60_000, 10_000)
    plain, wanted = examples.plain(f"python {line}", digits)
    said, found = examples.ours(f"{line} --trainer.strategy=deepspeed_stage_{stage}", digits)
    assert_logged(found, wanted, steps=12)
    assert f"ZeRO-{stage[0]}" in said
    # What it predicts after loading its best checkpoint.
    assert predicted(said) == pytest.approx(predicted(plain), rel=1e-2, abs=2e-4)
    assert len(predicted(plain)) > 30


def predicted(said: str) -> list[float]:
    """The numbers of the tensor that a script prints at its end, with four digits."""
    return [float(number) for number in re.findall(r"\d+\.\d{4}", said[said.rindex("tensor(") :])]


def printed(said: str) -> list[float]:
    """The losses that a loop of Fabric's prints, and what it prints of its evaluation."""
    return [float(number) for number in re.findall(r"(?:[lL]oss:?|Accuracy: \() ?([\d.]+)", said)]


def test_a_loop_of_fabrics_run_by_its_command_has_the_losses_of_fabric_alone(
    examples: Examples,
) -> None:
    run, digits = "fabric run --accelerator=cpu", (256, 64)
    plain, _ = examples.plain(f"{run} {IMAGES}", digits)
    said, _ = examples.ours(f"{run} --strategy=deepspeed_stage_2 {IMAGES}", digits)
    print("\n", *zip(printed(said), printed(plain), strict=True))
    assert len(printed(plain)) == 2 * 4 + 2 * 2
    assert printed(said) == pytest.approx(printed(plain), rel=CLOSE)
    assert "ZeRO-2" in said


def test_a_language_model_of_fabrics_has_the_losses_of_fabric_alone(
    examples: Examples, tmp_path: Path
) -> None:
    run = f"fabric run --accelerator=cpu {{}} {LANGUAGE}"
    plain, _ = examples.plain(run.format(""))
    # Its model returns the tokens of all rows in one dim, which a config has to declare.
    config = {
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "spmd": {"outputs": {"": "batch"}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    strategy, path = "--strategy=deepspeed", str(tmp_path / "ds.json")
    said, _ = examples.ours(run.format(strategy), PL_DEEPSPEED_CONFIG_PATH=path)
    print("\n", *zip(printed(said), printed(plain), strict=True))
    assert len(printed(plain)) == 10 + 2
    assert printed(said) == pytest.approx(printed(plain), rel=CLOSE)
    assert "ZeRO-2" in said


def test_an_output_that_no_rule_covers_is_refused_with_the_rules(examples: Examples) -> None:
    said, _ = examples.ours(f"fabric run --strategy=deepspeed_stage_2 {LANGUAGE}", status=1)
    assert "output 'of the model' has shape [350, 61]" in said
    assert '"spmd": {"outputs": {"": ' in said
