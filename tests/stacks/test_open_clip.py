"""open_clip's models, data and losses with an engine, beside plain torch with all rows."""

import csv
import random
from pathlib import Path

import pytest

from tests.stacks.engine_scripts import both
from tests.stacks.runs import by_spmdzero

SCRIPT = Path(__file__).parent / "open_clip_script.py"
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 50, 220)}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of images of one colour with a spot, and of `train.csv` with what they show."""
    from PIL import Image

    folder, draw = tmp_path_factory.mktemp("images"), random.Random(0)
    with (folder / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "title"])
        for index in range(24):
            colour, spot = draw.choice(list(COLOURS)), draw.choice(list(COLOURS))
            image = Image.new("RGB", (40, 40), COLOURS[colour])
            image.paste(COLOURS[spot], (8, 8, 8 + draw.randrange(4, 24), 20))
            image.save(folder / f"{index}.png")
            title = f"a {spot} spot on {colour}" + " paper" * draw.randrange(3)
            writer.writerow([folder / f"{index}.png", title])
    return folder


@pytest.mark.parametrize(("loss", "stage"), [("clip", 2), ("gathered", 3), ("siglip", 1)])
def test_a_loss_is_that_of_one_process_with_all_rows(
    loss: str, stage: int, data: Path, tmp_path: Path
) -> None:
    ours, plain = both(SCRIPT, [loss, str(data)], tmp_path, stage=stage, rows=4)
    assert len(plain["losses"]) == 6
    # fp32: sums in another order, through six steps of AdamW.
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["scale"] == pytest.approx(plain["scale"], rel=1e-5)
    for found, wanted in zip(ours["rows"], plain["rows"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3)


def test_its_own_training_has_no_engine_which_a_warning_says(data: Path, tmp_path: Path) -> None:
    words = [
        "-m", "open_clip_train.main", "--model", "ViT-S-32-alt", "--train-data",
        f"{data}/train.csv", "--dataset-type", "csv", "--csv-separator", ",", "--batch-size", "8",
        "--epochs", "1", "--workers", "0", "--precision", "fp32", "--device", "cpu",
        "--force-image-size", "32", "--logs", str(tmp_path),
    ]  # fmt: skip
    assert "trains by plain torch" in by_spmdzero(words, cwd=tmp_path).said
