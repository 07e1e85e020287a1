"""`"checkpoint": {"tag_validation": ...}`: what a save does when processes name different tags."""

from pathlib import Path

import pytest
import torch

import spmdzero
from spmdzero.engine import _checkpoints
from tests.support import engines


def start(mode: str) -> spmdzero.Engine:
    return engines.start(engines.Mean(), checkpoint={"tag_validation": mode})


def name_another(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    """Has a first process, beside this one, name `tag`; this test has one process only."""
    monkeypatch.setattr(
        _checkpoints, "everyones", lambda mine: [tag if mine == "tag-1" else mine, mine]
    )


# DeepSpeed takes the mode in any case too.
@pytest.mark.parametrize("mode", ["FAIL", "warn", "Ignore"])
def test_another_process_names_another_tag(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(mode)
    engines.three_calls(engine, torch.ones(8, 4))
    name_another(monkeypatch, "tag-0")
    if mode == "FAIL":
        # As in DeepSpeed an AssertionError, before anything is written.
        with pytest.raises(AssertionError, match=r"\['tag-0', 'tag-1'\].*the same tag"):
            engine.save_checkpoint(tmp_path, tag="tag-1")
        assert list(tmp_path.iterdir()) == []
        engines.three_calls(engine, torch.ones(8, 4))
        name_another(monkeypatch, "tag-1")
    engine.save_checkpoint(tmp_path, tag="tag-1")
    assert ("saves the tag 'tag-1', the first one 'tag-0'" in caplog.text) == (mode == "warn")
    monkeypatch.undo()
    path, _ = start("FAIL").load_checkpoint(tmp_path)
    assert path == str(tmp_path / ("tag-1" if mode == "FAIL" else "tag-0"))


@pytest.mark.parametrize("folder", [None, ""])
def test_a_save_into_no_folder_is_a_value_error(folder: str | None) -> None:
    with pytest.raises(ValueError, match="non-empty string"):
        start("WARN").save_checkpoint(folder)  # type: ignore[arg-type]


def test_an_unknown_mode_is_deepspeeds_config_error() -> None:
    with pytest.raises(spmdzero.DeepSpeedConfigError, match=r"tag_validation = 'foo'.*'FAIL'"):
        start("foo")
