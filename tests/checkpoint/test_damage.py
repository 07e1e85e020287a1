"""One flipped bit, one missing byte, one missing file: found before anything is used."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spmdzero
from spmdzero.errors import SpmdZeroCheckpointError
from tests.checkpoint.files import number_in, save
from tests.checkpoint.runs import assert_state, config, micro_batch, start, train, whole_state

Draw = random.Random
Damage = Callable[[Path, Draw], None]


def flip_a_bit(file: Path, draw: Draw) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, draw: Draw) -> None:
    with file.open("r+b") as opened:
        opened.truncate(draw.randrange(file.stat().st_size))


def append(file: Path, draw: Draw) -> None:
    with file.open("ab") as opened:
        opened.write(draw.randbytes(draw.randrange(1, 9)))


def swap_two_blocks(file: Path, draw: Draw) -> None:
    data = bytearray(file.read_bytes())
    half = len(data) // 2
    data = data[half:] + data[:half]
    assert data != file.read_bytes()
    file.write_bytes(data)


def delete(file: Path, draw: Draw) -> None:
    file.unlink()


def put_a_folder_there(file: Path, draw: Draw) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: list[Damage] = [
    *(flip_a_bit, truncate, append, swap_two_blocks, delete, put_a_folder_there)
]


def check(root: Path, draw: Draw, damage: Damage, kind: int) -> None:
    """Damages the newest of two checkpoints, and sees it refused."""
    folder = root / "damaged"
    shutil.copytree(root / "good", folder)
    file = sorted((folder / "step2").iterdir())[kind]
    damage(file, draw)
    with pytest.raises(SpmdZeroCheckpointError) as caught:
        number_in(folder, "step2")
    # It names the file, or the one that should have led to it.
    named = Path(caught.value.file)
    assert named == file or file.name == "COMMITTED" or file.name.startswith("manifest")
    assert folder / "step2" in (named, *named.parents)
    assert caught.value.newest == "step1"
    assert "step1" in str(caught.value)
    assert number_in(folder, "step1") == 1
    shutil.rmtree(folder)


@pytest.fixture
def good(folder: Path) -> Path:
    for number in (1, 2):
        save(folder / "good", number)
    assert len(list((folder / "good" / "step2").iterdir())) == 4
    return folder


def test_every_damage_of_every_file_is_found(good: Path) -> None:
    draw = random.Random(3)
    for damage in [flip_a_bit, flip_a_bit, *DAMAGES]:
        for kind in range(4):
            check(good, draw, damage, kind)


@pytest.mark.slow
def test_a_thousand_flipped_bits_and_cut_ends_are_found(good: Path) -> None:
    draw = random.Random(4)
    for case in range(1200):
        check(good, draw, flip_a_bit if case % 3 else truncate, case % 4)


def test_any_flipped_bit_of_a_commit_file_is_found(good: Path) -> None:
    file = good / "good" / "step2" / "COMMITTED"
    line = file.read_bytes()
    for place in range(len(line) * 8):
        altered = bytearray(line)
        altered[place // 8] ^= 1 << place % 8
        file.write_bytes(altered)
        with pytest.raises(SpmdZeroCheckpointError):
            number_in(good / "good", "step2")


def a_newer_format(folder: Path) -> None:
    file = folder / "step2" / "COMMITTED"
    file.write_text(file.read_text().replace("checkpoint 1:", "checkpoint 2:"))


def other_files(folder: Path) -> None:
    shutil.rmtree(folder / "step2")
    (folder / "step2").mkdir()
    (folder / "step2" / "beach.jpg").write_bytes(b"\xff\xd8")


def test_what_is_no_checkpoint_of_this_version_says_so(good: Path) -> None:
    for act, reason in {
        a_newer_format: "format 2 is newer",
        other_files: "no checkpoint that spmdzero or DeepSpeed",
        lambda folder: shutil.rmtree(folder / "step2"): "no such tag",
    }.items():
        act(good / "good")
        with pytest.raises(SpmdZeroCheckpointError, match=reason) as caught:
            number_in(good / "good", "step2")
        assert caught.value.newest == "step1"


def test_naming_the_newest_tag_reads_none_of_its_tensors(good: Path) -> None:
    save(good / "good", 3)
    (tensors,) = (good / "good" / "step3").glob("tensors-*")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    # It is checked by whoever loads it.
    for tag, reason, newest in (("step7", "no such tag", "step3"), ("step3", "altered", "step2")):
        with pytest.raises(SpmdZeroCheckpointError, match=reason) as caught:
            number_in(good / "good", tag)
        assert caught.value.newest == newest


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    engine = start(config(2, gas=2, bf16={"enabled": True}))
    train(engine, range(3))
    return engine


def test_a_failed_load_leaves_the_engine_as_it_was(engine: spmdzero.Engine, tmp_path: Path) -> None:
    for damage, kind in ((flip_a_bit, 3), (truncate, 3), (flip_a_bit, 2), (delete, 1)):
        folder = tmp_path / f"{damage.__name__} {kind}"
        engine.save_checkpoint(folder, tag="good")
        micro_batch(engine, 9)
        engine.save_checkpoint(folder, tag="bad")
        micro_batch(engine, 10)
        before, counters = whole_state(engine), vars(engine._training.counters).copy()
        generator, lr = torch.get_rng_state(), engine.get_lr()
        damage(sorted((folder / "bad").iterdir())[kind], random.Random(5))
        with pytest.raises(SpmdZeroCheckpointError) as caught:
            engine.load_checkpoint(folder)
        assert caught.value.newest == "good"
        assert_state(engine, before)
        assert vars(engine._training.counters) == counters
        assert torch.equal(torch.get_rng_state(), generator)
        assert engine.get_lr() == lr
        path, _ = engine.load_checkpoint(folder, tag="good")
        assert path == str(folder / "good")


def test_a_damaged_latest_is_an_error_that_names_the_newest_complete_tag(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    engine.save_checkpoint(tmp_path, tag="good")
    for content in (b"", b"no-such-tag", b"../other", b"\xff\xfe"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(SpmdZeroCheckpointError) as caught:
            engine.load_checkpoint(tmp_path)
        assert caught.value.newest == "good"
