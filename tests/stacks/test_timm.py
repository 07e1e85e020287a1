"""timm's models, Mixup, ModelEmaV3, schedules and optimizers with an engine."""

from pathlib import Path

import pytest

from tests.stacks.engine_scripts import both, config
from tests.stacks.runs import by_spmdzero

SCRIPT = Path(__file__).parent / "timm_script.py"
VIT = "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("model", "optimizer", "stage"),
    [
        (VIT, "adamw", 2),
        (VIT, "nadamw", 3),
        (VIT, "adan", 1),
        (VIT, "lion", 2),
        ("resnet10t", "nesterov", 1),
    ],
)
def test_a_model_its_average_and_its_schedule_are_those_of_plain_torch(
    model: str, optimizer: str, stage: int, tmp_path: Path
) -> None:
    ours, plain = both(SCRIPT, [model, optimizer], tmp_path, stage=stage, rows=8)
    # fp32: sums in another order, through six steps.
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["rates"] == plain["rates"]
    for name in ("logits", "averaged"):
        for found, wanted in zip(ours[name], plain[name], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("optimizer", ["lamb", "adafactor"])
def test_an_optimizer_that_needs_whole_tensors_is_refused(optimizer: str, tmp_path: Path) -> None:
    words = [str(SCRIPT), VIT, optimizer, str(tmp_path / "out"), config(tmp_path, 2, 8)]
    assert "its update can't run on shards" in by_spmdzero(words, cwd=tmp_path, status=1).said
